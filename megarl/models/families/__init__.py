"""One file a model family, named as its Hugging Face ``model_type``; `megarl.models` finds the files by themselves."""
