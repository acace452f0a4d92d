"""`megarl doctor`: what it says about versions that do not fit each other."""

from importlib import metadata

from megarl.views.doctor import within_range


def test_versions_outside_the_range_of_another_package_are_named():
    assert within_range("transformer-engine", "2.11.0") == "2.11.0"
    said = within_range("transformer-engine", "2.20.0")
    megatron = f"Megatron-Core {metadata.version('megatron-core')}"
    assert said.startswith("2.20.0, but ") and megatron in said and "<2.1" in said and ">=2.9" in said
