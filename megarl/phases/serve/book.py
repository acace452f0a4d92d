"""The conversations of a served stage: turns become one sequence, rewarded ones a group, and groups the stage."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.templates import Renderer
from megarl.phases.serve.chat import (
    Message,
    Question,
    Refused,
    answer,
    continues,
    first_tokens,
    further_tokens,
    read_question,
    repeats,
)
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import Completion, continuation_seed, response_seed
from megarl.storage.rollouts import Group, Response

NAME = re.compile(r"[A-Za-z0-9_.:@+-]{1,200}")


@dataclass(frozen=True)
class Answered:
    """The last answer of a conversation: a client whose connection broke asks for it again."""

    message: Message
    completion: Completion
    prompt: int  # tokens before it


@dataclass
class Conversation:
    """One response in the making: all that follows the first prompt, turn by turn."""

    sample: int  # its place in its group
    prompt: list[int]
    messages: list[Message] = field(default_factory=list)  # that the client has been answered, answers included
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    finish_reason: str = ""  # of the last turn; none yet where there is no turn
    busy: bool = False  # a turn is being generated
    rewarded: Response | None = None
    last: Answered | None = None

    def context(self, tokens: list[int]) -> None:
        """What a tool or user said."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.sampled += [False] * len(tokens)

    def speak(self, tokens: list[int], logprobs: list[float]) -> None:
        """What the policy sampled."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampled += [True] * len(tokens)

    def response(self, reward: float, correct: float | None, version: int) -> Response:
        sampled = np.array(self.sampled, bool)
        return Response(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            reward,
            self.finish_reason,
            version,
            correct=correct,
            loss_mask=None if sampled.all() else sampled,
        )


@dataclass(frozen=True)
class Turn:
    """What the engine is asked for."""

    conversation: Conversation
    question: Question
    context: list[int]  # tokens since the last turn; none before the first
    limit: int  # tokens of the answer
    seed: int

    @property
    def prompt(self) -> list[int]:
        """All tokens that come before the answer."""
        return [*self.conversation.prompt, *self.conversation.tokens, *self.context]


@dataclass
class _Group:
    number: int
    conversations: dict[str, Conversation] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)  # of a group that this process has stored, by conversation
    stored: bool = False


class Book:
    """All conversations of a stage. Its methods may be called by several threads; they raise `Refused`.

    store: writes a whole group, durable on return. stored: names and numbers of groups that an earlier attempt wrote.
    """

    def __init__(
        self,
        recipe: Recipe,
        numbers: range,
        renderer: Renderer,
        decode: Callable[[list[int]], str],
        version: int,
        store: Callable[[str, Group], None],
        stored: dict[str, int],
    ) -> None:
        self._recipe, self._numbers, self._renderer, self._decode = recipe, numbers, renderer, decode
        self._version, self._store = version, store
        self._groups = {name: _Group(number, stored=True) for name, number in stored.items()}
        self._missing = len(numbers) - len(stored)  # groups that are to be stored
        self._lock = threading.RLock()

    @property
    def complete(self) -> bool:
        """Whether every group of the stage is stored."""
        return not self._missing

    def begin(self, group: str, name: str, body: Any) -> Turn | Answered:
        """A request of a chat completion: what the engine is to answer, or what it has answered already."""
        question = read_question(body, self._recipe.rollout.temperature)
        with self._lock:
            conversation = self._find(group, name)
            if conversation is None:
                conversation = self._start(group, name, question)
            if conversation.busy:
                raise Refused(409, f"conversation {name!r} is being answered already")
            if conversation.rewarded is not None:
                raise Refused(409, f"conversation {name!r} has its reward: begin another one")
            if conversation.last and repeats(conversation.messages, question.messages):
                return conversation.last
            context: list[int] = []
            if conversation.messages:
                if not continues(conversation.messages, question.messages):
                    raise Refused(
                        409,
                        f"conversation {name!r} was changed: its messages must begin with those so far, and answers",
                    )
                turn, last = len(conversation.messages) - 1, conversation.tokens[-1]
                context = further_tokens(self._renderer, question, turn, last, f"conversation {name!r}")
            longest = self._recipe.rollout.max_response_tokens
            left = longest - len(conversation.tokens) - len(context)
            if left < 1:
                conversation.finish_reason = "length"
                raise Refused(
                    400,
                    f"context_length_exceeded: conversation {name!r} has no room left in rollout.max_response_tokens "
                    f"= {longest}; give it its reward",
                )
            seed = response_seed(self._recipe.run.seed, self._groups[group].number, conversation.sample)
            seed = continuation_seed(seed, len(conversation.tokens) + len(context))
            conversation.busy = True
        return Turn(conversation, question, context, min(left, question.max_tokens or left), seed)

    def end(self, turn: Turn, completion: Completion | None) -> Message:
        """The engine's answer as a message; None: it was interrupted, and the turn can be asked for again."""
        conversation = turn.conversation
        with self._lock:
            conversation.busy = False
            if completion is None:
                raise Refused(503, "the phase stops and forgets this conversation: begin it anew when it serves again")
            if not len(completion.tokens) or not np.isfinite(completion.logprobs).all():
                raise Refused(500, "the engine gave no tokens, or log-probs that are not finite: ask again")
            prompt = len(turn.prompt)
            conversation.context(turn.context)
            tokens = completion.tokens.tolist()
            conversation.speak(tokens, completion.logprobs.tolist())
            conversation.finish_reason = completion.finish_reason
            message = answer(self._decode(tokens), turn.question.tools)
            conversation.messages = [*turn.question.messages, message]
            conversation.last = Answered(message, completion, prompt)
            return message

    def reward(self, group: str, name: str, body: Any) -> None:
        """Ends a conversation; the last one of a group stores it."""
        reward, correct = _number(body, "reward"), _number(body, "correct", optional=True)
        if reward is None or correct not in (None, 0.0, 1.0):
            raise Refused(400, 'expected {"reward": NUMBER}, and perhaps "correct": 0 or 1')
        with self._lock:
            if group in self._groups and self._groups[group].rewards.get(name) == reward:
                return  # it was given before
            conversation = self._find(group, name)
            if conversation is None or not conversation.finish_reason:
                raise Refused(404, f"conversation {name!r} has no answer of the model yet")
            if conversation.busy:
                raise Refused(409, f"conversation {name!r} is being answered")
            given = conversation.response(reward, correct, self._version)
            if conversation.rewarded is not None and conversation.rewarded.reward != reward:
                raise Refused(409, f"conversation {name!r} has reward {conversation.rewarded.reward:g} already")
            conversation.rewarded = given
            self._finish(group)

    def drop(self, group: str, name: str) -> None:
        """Forget a conversation that its agent gave up, so that another one can take its place."""
        with self._lock:
            conversation = self._find(group, name)
            if conversation is None or conversation.busy:
                raise Refused(409, f"conversation {name!r} is not there, or is being answered")
            del self._groups[group].conversations[name]
            if not self._groups[group].conversations:
                del self._groups[group]  # another one may have its place

    def state(self) -> dict[str, Any]:
        """For people and harnesses: what is stored and what is under way."""
        with self._lock:
            groups = self._groups.items()
            return {
                "groups": len(self._numbers),
                "conversations_per_group": self._recipe.rollout.responses_per_prompt,
                "stored": sorted(name for name, group in groups if group.stored),
                "open": {
                    name: {
                        key: "rewarded" if one.rewarded else "open" for key, one in sorted(group.conversations.items())
                    }
                    for name, group in groups
                    if not group.stored
                },
            }

    def _find(self, group: str, name: str) -> Conversation | None:
        for text in (group, name):
            if not NAME.fullmatch(text):
                raise Refused(400, f"{text[:60]!r} is no name: up to 200 letters, digits and _ . : @ + -")
        found = self._groups.get(group)
        if found is not None and found.stored:
            raise Refused(409, f"group {group!r} is complete")
        return found.conversations.get(name) if found else None

    def _start(self, group: str, name: str, question: Question) -> Conversation:
        if any(message["role"] in ("assistant", "tool") for message in question.messages):
            raise Refused(
                409,
                f"conversation {name!r} is not known, so it begins with messages of system and user: what the model "
                "has said would not be trained; begin it anew",
            )
        prompt = first_tokens(self._renderer, question, f"conversation {name!r}")
        longest = self._recipe.data.max_prompt_tokens
        if not 0 < len(prompt) <= longest:
            raise Refused(400, f"the first prompt has {len(prompt)} tokens, but data.max_prompt_tokens = {longest}")
        found = self._groups.get(group) or _Group(self._free_number(group))
        others = found.conversations.values()
        if len(others) == self._recipe.rollout.responses_per_prompt:
            raise Refused(409, f"group {group!r} has its {len(others)} conversations: {name!r} is one too many")
        if any(one.prompt != prompt for one in others):
            raise Refused(400, f"group {group!r}: all conversations of a group begin with the same messages and tools")
        self._groups[group] = found
        used = {one.sample for one in others}
        sample = next(number for number in range(len(used) + 1) if number not in used)
        found.conversations[name] = Conversation(sample, prompt)
        return found.conversations[name]

    def _free_number(self, group: str) -> int:
        taken = {one.number for one in self._groups.values()}
        for number in self._numbers:
            if number not in taken:
                return number
        raise Refused(409, f"the stage has its {len(self._numbers)} groups: {group!r} is one too many")

    def _finish(self, name: str) -> None:
        group = self._groups[name]
        done = sorted(group.conversations.values(), key=lambda one: one.sample)
        responses = [one.rewarded for one in done if one.rewarded is not None]
        if len(responses) == self._recipe.rollout.responses_per_prompt:
            self._store(name, Group(group.number, np.array(done[0].prompt, np.int32), tuple(responses)))
            group.rewards = {name: one.rewarded.reward for name, one in group.conversations.items() if one.rewarded}
            group.stored, group.conversations = True, {}
            self._missing -= 1


def _number(body: Any, name: str, optional: bool = False) -> float | None:
    value = body.get(name) if isinstance(body, dict) else None
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise Refused(400, f"{name}: expected a finite number")
    return float(value)
