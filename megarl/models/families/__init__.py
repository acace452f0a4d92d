"""One file a model family, named as its Hugging Face ``model_type``; `megarl.models` finds the files by themselves.

A file has either a ``FAMILY`` or a ``REFUSAL``: why models of that kind cannot be trained.
"""
