"""The file with which a process shows that it makes progress."""

from megarl import beats


def test_the_longest_text_of_any_alphabet_is_read_back(tmp_path, monkeypatch):
    path = tmp_path / "beats"
    monkeypatch.setenv(beats.FILE, str(path))
    for number, character in enumerate('a"\n日🦙', start=1):
        beats.beat("reward", character * 500)
        found = beats.read_beat(path)
        assert found == beats.Beat(number, "reward", character * beats.CHARACTERS)
