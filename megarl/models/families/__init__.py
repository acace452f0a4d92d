"""One file a model family, named as its Hugging Face ``model_type``, with its ``FAMILY``.

`megarl.models` finds the files by themselves.
"""
