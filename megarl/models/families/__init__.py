"""One file for each model family, named as its Hugging Face ``model_type``, that defines its ``FAMILY``.

`megarl.models` finds the files by listing this package, so a new family needs no registration.
"""
