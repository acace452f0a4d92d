"""The conversations of a served stage.

The turns of a conversation become one response, the rewarded conversations with the same prompt a group, and the groups
the stage. Agents choose the names of groups and conversations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.templates import Renderer
from megarl.foreign import bounded
from megarl.phases.serve.chat import (
    THOUGHTS,
    ChatRequest,
    Message,
    Refused,
    answer,
    new_tokens,
    parse_chat_request,
    same,
)
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import Completion, continuation_seed, response_seed
from megarl.storage.rollouts import Group, Response


@dataclass
class Conversation:
    """A response that grows turn by turn: all tokens that follow the first prompt."""

    sample: int  # index of the response in its group
    prompt: list[int]  # tokens of the messages before the first answer
    messages: list[Message] = field(default_factory=list)  # all so far, up to and including the last answer
    tools: list[Any] | None = None
    # one element per token of the response
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 for tokens of tools and users
    sampled: list[bool] = field(default_factory=list)  # False for tokens of tools and users
    discarded: int = 0  # faulty answers of the engine that were thrown away
    finish_reason: str = ""  # of the last turn; "" before the first one
    busy: bool = False  # a turn is being generated
    rewarded: Response | None = None  # the finished response, once it has its reward
    last: Turn | None = None  # with its answer, for a client that lost its connection and asks for it again

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        """Append tokens that the policy sampled; without ``logprobs`` those of tools or users, not trained."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.sampled += [logprobs is not None] * len(tokens)

    def response(self, reward: float, correct: float | None, version: int) -> Response:
        """The conversation as a response to store. version: of the policy that sampled it."""
        sampled = np.array(self.sampled, bool)
        return Response(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            reward,
            self.finish_reason,
            version,
            correct=correct,
            loss_mask=None if sampled.all() else sampled,
            discarded=self.discarded or None,
        )


@dataclass
class Turn:
    """A turn that the engine must generate, and then its answer."""

    conversation: Conversation
    request: ChatRequest
    context: list[int]  # tokens of tools and users since the last answer; none in the first turn
    prompt: list[int]  # all tokens before the answer
    limit: int  # most tokens of the answer
    seed: int
    discarded: int = 0  # faulty answers of the engine that were thrown away
    answer: Message | None = None
    completion: Completion | None = None


@dataclass
class _Group:
    number: int
    conversations: dict[str, Conversation] = field(default_factory=dict)  # by name; emptied when the group is stored
    rewards: dict[str, float] = field(default_factory=dict)  # by name, once this process has stored the group
    stored: bool = False


class Conversations:
    """All conversations of a stage. Its methods are thread-safe, and raise `Refused` for requests that are not served.

    numbers: the ids of the stage's groups.
    decode: turns the tokens of an answer into text.
    version: of the policy that answers.
    store: callback that writes a complete group, given with its name; it must be durable when the callback returns.
    stored: {name: id} of the groups that an earlier attempt at the phase has stored.
    banned: the tokens of prompts that are held out for evaluation.
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
        banned: frozenset[tuple[int, ...]],
    ) -> None:
        self._recipe, self._numbers, self._renderer, self._decode = recipe, numbers, renderer, decode
        self._version, self._store, self._banned = version, store, banned
        self._groups = {name: _Group(number, stored=True) for name, number in stored.items()}
        self._missing = len(numbers) - len(stored)  # number of groups that are not stored yet
        self._lock = threading.RLock()

    @property
    def complete(self) -> bool:
        """Whether every group of the stage is stored."""
        return not self._missing

    def begin(self, group: str, name: str, body: Any) -> Turn:
        """Begin to handle a request for a chat completion.

        Returns the turn to generate, for which `end` must be called, or the last one if the request repeats it.
        """
        recipe = self._recipe
        request = parse_chat_request(body, recipe.rollout.temperature, recipe.data.template_arguments)
        where = f"conversation {name!r}"
        prompt: list[int] | None = None
        if not any(message["role"] in ("assistant", "tool") for message in request.messages):
            prompt = new_tokens(self._renderer, request, None, where)  # without the lock: others need not wait
        with self._lock:
            conversation = self._find(group, name) or self._start(group, name, prompt)
            if conversation.busy:
                raise Refused(409, f"{where} is being answered already")
            if conversation.rewarded is not None:
                raise Refused(409, f"{where} has its reward and is over: begin another one")
            if conversation.messages and request.tools != conversation.tools:
                raise Refused(409, f"the tools of {where} were changed: the model has read those of the first request")
            agree = all(map(same, conversation.messages, request.messages))  # as far as both go
            more = len(request.messages) - len(conversation.messages)
            if conversation.last and agree and more == -1:
                return conversation.last
            if conversation.messages and not (agree and more > 0):
                raise Refused(
                    409,
                    f"the history of {where} was changed: its messages must begin with all those so far, including the "
                    "model's answers as they were given",
                )
            seed = response_seed(self._recipe.run.seed, self._groups[group].number, conversation.sample)
            conversation.busy = True
        try:
            return self._turn(conversation, request, seed, where)
        except BaseException:
            conversation.busy = False
            raise

    def _turn(self, conversation: Conversation, request: ChatRequest, seed: int, where: str) -> Turn:
        """The next turn of a conversation that this request has made busy. seed: of the conversation."""
        context: list[int] = []
        if conversation.messages:
            context = new_tokens(self._renderer, request, len(conversation.messages) - 1, where)
            if context[:1] == conversation.tokens[-1:]:  # the template's end of a message, which the model has sampled
                del context[0]
        longest = self._recipe.rollout.max_response_tokens
        left = longest - len(conversation.tokens) - len(context)
        if left < 1:
            conversation.finish_reason = "length"
            raise Refused(
                400,
                f"context_length_exceeded: {where} has used up rollout.max_response_tokens = {longest}; end it by "
                "posting its reward",
            )
        seed = continuation_seed(seed, len(conversation.tokens) + len(context))
        prompt = [*conversation.prompt, *conversation.tokens, *context]
        return Turn(conversation, request, context, prompt, min(left, request.max_tokens or left), seed)

    def end(self, turn: Turn, completion: Completion | None) -> None:
        """Record the engine's answer to a turn.

        Raises `Refused`, and leaves the conversation as it was, if the engine was interrupted: ``completion`` is None.
        """
        conversation = turn.conversation
        with self._lock:
            conversation.busy = False
            if completion is None:
                raise Refused(503, "the server is stopping and loses this conversation: begin it anew after a restart")
            tokens = completion.tokens.tolist()
            conversation.discarded += turn.discarded
            conversation.add(turn.context)
            conversation.add(tokens, completion.logprobs.tolist())
            conversation.finish_reason = completion.finish_reason
            thinks = self._decode(turn.prompt[-8:]).rstrip().endswith(THOUGHTS[0])
            turn.answer, turn.completion = answer(self._decode(tokens), turn.request.tools, thinks), completion
            conversation.messages, conversation.tools = [*turn.request.messages, turn.answer], turn.request.tools
            conversation.last = turn

    def reward(self, group: str, name: str, body: Any) -> None:
        """Record the reward of a conversation, which ends it; with the last reward of a group, store the group."""
        known = isinstance(body, dict) and {"reward"} <= body.keys() <= {"reward", "correct"}
        if not known or (correct := body.get("correct")) not in (None, 0, 1):
            raise Refused(400, 'expected {"reward": NUMBER}, optionally with "correct": 0 or 1')
        try:
            reward = bounded(body["reward"])
        except ValueError as error:
            raise Refused(400, f"reward {error}") from error
        with self._lock:
            if group in self._groups and self._groups[group].rewards.get(name) == reward:
                return  # the client repeats a request, and the group is stored already
            conversation = self._find(group, name)
            if conversation is None or not conversation.finish_reason:
                raise Refused(404, f"conversation {name!r} does not exist or has no answer of the model yet")
            if conversation.busy:
                raise Refused(409, f"conversation {name!r} is being answered")
            given = conversation.response(reward, correct if correct is None else float(correct), self._version)
            if conversation.rewarded is not None and conversation.rewarded.reward != reward:
                raise Refused(409, f"conversation {name!r} already has reward {conversation.rewarded.reward:g}")
            conversation.rewarded = given
            self._finish(group)

    def drop(self, group: str, name: str) -> None:
        """Delete a conversation that its agent has given up, so that another one can take its place."""
        with self._lock:
            conversation = self._find(group, name)
            if conversation is None or conversation.busy:
                raise Refused(409, f"conversation {name!r} does not exist, or is being answered")
            del self._groups[group].conversations[name]
            if not self._groups[group].conversations:
                del self._groups[group]  # so that its id is free for another group

    def state(self) -> dict[str, Any]:
        """The answer to ``GET /state``: which groups are stored and which conversations are open."""
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
        """The conversation, None if there is none yet; `Refused` if the group is stored."""
        found = self._groups.get(group)
        if found is not None and found.stored:
            raise Refused(409, f"group {group!r} is complete and stored: use the name of another group")
        return found.conversations.get(name) if found else None

    def _start(self, group: str, name: str, prompt: list[int] | None) -> Conversation:
        """Create a conversation, and its group if that is new; `Refused` if there is no place for them.

        prompt: the tokens of its first messages; None if the model or a tool has said some of them.
        """
        if prompt is None:
            raise Refused(
                409,
                f"conversation {name!r} is unknown, so its first request may only have system and user messages, since "
                "answers from elsewhere would not be trained; begin it anew",
            )
        longest = self._recipe.data.max_prompt_tokens
        if not 0 < len(prompt) <= longest:
            raise Refused(400, f"the first prompt has {len(prompt)} tokens, but data.max_prompt_tokens = {longest}")
        if tuple(prompt) in self._banned:
            raise Refused(400, f"group {group!r}: its prompt is held out for evaluation, so it must not be trained")
        found = self._groups.get(group) or _Group(self._free_number(group))
        others = found.conversations.values()
        if len(others) == self._recipe.rollout.responses_per_prompt:
            raise Refused(409, f"group {group!r} already has its {len(others)} conversations: no room for {name!r}")
        if any(one.prompt != prompt for one in others):
            raise Refused(400, f"group {group!r}: its conversations must all begin with the same messages and tools")
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
        raise Refused(409, f"the stage already has its {len(self._numbers)} groups: no room for {group!r}")

    def _finish(self, name: str) -> None:
        """Store a group if all of its conversations have their reward."""
        group = self._groups[name]
        done = sorted(group.conversations.values(), key=lambda one: one.sample)
        responses = [one.rewarded for one in done if one.rewarded is not None]
        if len(responses) == self._recipe.rollout.responses_per_prompt:
            self._store(name, Group(group.number, np.array(done[0].prompt, np.int32), tuple(responses)))
            group.rewards = {name: one.rewarded.reward for name, one in group.conversations.items() if one.rewarded}
            group.stored, group.conversations = True, {}
            self._missing -= 1
