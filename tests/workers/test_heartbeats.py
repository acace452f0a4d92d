"""The file with which a process shows that it makes progress."""

from megarl import heartbeats


def test_the_longest_text_of_any_alphabet_is_read_back(tmp_path, monkeypatch):
    path = tmp_path / "beats"
    monkeypatch.setenv(heartbeats.FILE, str(path))
    for number, character in enumerate('a"\n日🦙', start=1):
        heartbeats.beat("reward", character * 500)
        found = heartbeats.read_beat(path)
        assert found == heartbeats.Beat(number, "reward", character * heartbeats.CHARACTERS)
