"""Hashes of configs that are keys of caches: a search asks for those of one model a million times."""

from typing import Any, TypeVar

T = TypeVar("T")
_KEPT = "_hash"


def hashed_once(config: type[T]) -> type[T]:
    """Let instances of a frozen dataclass keep their hash once it is computed. Copies for other processes, where
    strings have other hashes, are without it."""
    of_fields: Any = config.__hash__

    def kept_hash(self: Any) -> int:
        kept = self.__dict__.get(_KEPT)
        if kept is None:
            kept = self.__dict__[_KEPT] = of_fields(self)
        return int(kept)

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _KEPT}

    of_class: Any = config
    of_class.__hash__, of_class.__getstate__ = kept_hash, state
    return config
