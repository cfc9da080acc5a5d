"""What a model records for each token, and models that are known by name."""

from __future__ import annotations

from dataclasses import dataclass

from tq_fs.errors import InvalidConfig
from tq_fs.fields import NARROW_TYPES, narrowest
from tq_fs.planner._sizes import at_least_one

TYPE_BYTES = {"uint8": 1, "uint16": 2, "int32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedModel:
    """The routing of a mixture-of-experts model.

    Attributes
    ----------
    layers
        Layers whose routing is recorded. Dense layers do not route; add them where the engine
        records them nevertheless.
    topk
        Experts that the router chooses for a token in a layer; shared ones are not chosen.
    experts
        Experts that it chooses from: ids are below it.
    """

    layers: int
    topk: int
    experts: int

    def __post_init__(self) -> None:
        """Refuse models that cannot be."""
        for name in ("layers", "topk", "experts"):
            at_least_one(name, getattr(self, name))
        if self.topk > self.experts:
            raise InvalidConfig(
                f"a token cannot go to {self.topk} of {self.experts} experts",
                subject="topk",
                remedy=f"choose at most {self.experts}",
            )
        if self.experts > NARROW_TYPES["int32"]:
            raise InvalidConfig(f"{self.experts:,} ids do not fit int32", subject="experts")

    def fits(self, dtype: str) -> bool:
        """Tell whether every expert's id can be stored as `dtype`."""
        return self.experts <= NARROW_TYPES[dtype]

    def stored_type(self, asked: str) -> str:
        """Return the type that is stored for ``auto`` or a name.

        Raises
        ------
        InvalidConfig
            Unknown, or too small for the experts.
        """
        least = narrowest(self.experts - 1)
        if asked == "auto":
            return least
        if asked not in TYPE_BYTES:
            raise InvalidConfig(
                f"{asked!r} is no stored type",
                subject="stored",
                remedy="choose uint8, uint16, int32 or auto",
            )
        if not self.fits(asked):
            raise InvalidConfig(
                f"{self.experts} experts do not fit {asked}",
                subject="stored",
                remedy=f"store as {least} or auto",
            )
        return asked

    def row_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's routing over all layers."""
        return self.layers * self.topk * TYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model known by name, and how many nodes it is planned for unless somebody says."""

    model: RoutedModel
    nodes: int = 8


def _preset(layers: int, topk: int, experts: int, nodes: int = 8) -> Preset:
    return Preset(model=RoutedModel(layers=layers, topk=topk, experts=experts), nodes=nodes)


# Layers without the dense ones at a model's start, as the configurations of the models have them.
PRESETS = {
    "deepseek-v3": _preset(58, 8, 256),
    "glm-4.5": _preset(89, 8, 160),
    "glm-4.5-air": _preset(45, 8, 128),
    "glm-5.2": _preset(75, 8, 256, 32),
    "gpt-oss-120b": _preset(36, 4, 128),
    "gpt-oss-20b": _preset(24, 4, 32),
    "kimi-k2": _preset(60, 8, 384),
    "mixtral-8x7b": _preset(32, 2, 8),
    "qwen3-235b-a22b": _preset(94, 8, 128),
    "qwen3-30b-a3b": _preset(48, 8, 128),
    "qwen3-next-80b-a3b": _preset(48, 10, 512),
    "qwen3.6-35b-a3b": _preset(40, 8, 256, 2),
}


def preset(name: str) -> Preset:
    """Return a model by name.

    Raises
    ------
    InvalidConfig
        It is not known; the message lists those that are.
    """
    if name.lower() not in PRESETS:
        raise InvalidConfig(
            f"no model is called {name!r}",
            subject="preset",
            remedy=f"known are {', '.join(PRESETS)}; or give layers, topk and experts",
        )
    return PRESETS[name.lower()]
