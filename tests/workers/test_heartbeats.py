"""The heartbeat file, with which a process shows that it makes progress."""

from megarl import heartbeats


def test_a_long_text_in_any_alphabet_is_read_back_truncated(tmp_path, monkeypatch):
    path = tmp_path / "beats"
    monkeypatch.setenv(heartbeats.FILE, str(path))
    for number, character in enumerate('a"\n日🦙', start=1):
        heartbeats.beat("reward", character * 500)
        found = heartbeats.read_beat(path)
        assert found == heartbeats.Beat(number, "reward", character * heartbeats.CHARACTERS)
