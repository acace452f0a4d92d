"""For tests only: placeholders for what SGLang and transformers import of torchvision."""

import enum
import sys
import types
from importlib.machinery import ModuleSpec

__version__ = "0.28.0"
__path__: list[str] = []


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Placeholder(types.ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.InterpolationMode = InterpolationMode
        sys.modules[name] = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


io = Placeholder("torchvision.io")
transforms = Placeholder("torchvision.transforms")
transforms.functional = Placeholder("torchvision.transforms.functional")
transforms.v2 = Placeholder("torchvision.transforms.v2")
transforms.v2.functional = Placeholder("torchvision.transforms.v2.functional")
