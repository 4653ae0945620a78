"""What is about to change, so that it can be put back: a rollback journal."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distopt import device
from distopt.buckets.shared_state import SharedState
from distopt.compress.state import State


class Undo:
    """Remember what is about to change, and put it back."""

    # The memory of copies is used again: what was kept before `forget` costs a pass over it, and no new memory.

    def __init__(self) -> None:
        # By the address and the bytes of what they are copies of.
        self._copies: dict[tuple[int, int], np.ndarray] = {}
        self._arrays: dict[tuple[int, int], np.ndarray] = {}
        self._fields: list[tuple[object, dict[str, Any]]] = []
        self._states: list[tuple[State, State]] = []
        self._actions: list[Callable[[], object]] = []

    def keep(self, *arrays: np.ndarray) -> None:
        """Copy arrays, unless they were copied since ``forget``."""
        for array in arrays:
            place = device.address(array), array.nbytes
            if place in self._arrays:
                continue
            copy = self._copies.get(place)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                self._copies[place] = device.copied(array)
            else:
                device.copy(copy, array)
            self._arrays[place] = array

    def keep_fields(self, part: object, *names: str) -> None:
        """Remember attributes of an object, which a change replaces by others: what they hold is not copied."""
        self._fields.append((part, {name: getattr(part, name) for name in names}))

    def keep_state(self, state: State) -> None:
        """Remember which arrays a dict has, and copy them."""
        self._states.append((state, dict(state)))
        if isinstance(state, SharedState):
            self._copies |= {(device.address(x), x.nbytes): copy for x, copy in state.slots()}
        self.keep(*state.values())
        if isinstance(state, SharedState):
            state.keep()

    def on_undo(self, action: Callable[[], object]) -> None:
        """Call this once, at the next ``undo``."""
        self._actions.append(action)

    def undo(self) -> None:
        """Put back everything; it stays known, so that the same change may be tried again."""
        actions, self._actions = self._actions, []
        for action in reversed(actions):
            action()
        for part, values in reversed(self._fields):
            for name, value in values.items():
                setattr(part, name, value)
        for state, arrays in reversed(self._states):
            for name in state.keys() - arrays.keys():
                del state[name]
            for name, array in arrays.items():
                state[name] = array
        for place, array in self._arrays.items():
            device.copy(array, self._copies[place])

    def undo_parts(self, state: State, parts: Callable[[np.ndarray], Iterable[np.ndarray]]) -> None:
        """Put back those parts of the arrays of a state that ``parts`` returns of an array of their size."""
        before = next(arrays for kept, arrays in self._states if kept is state)
        for name, array in before.items():
            copy = self._copies[device.address(array), array.nbytes]
            for place, was in zip(parts(state.setdefault(name, array)), parts(copy), strict=True):
                device.copy(place, was)
        for name in state.keys() - before.keys():
            for place in parts(state[name]):
                device.clear(place)

    def forget(self) -> None:
        """Begin anew: what has changed is to stay."""
        # Other copies are of memory that has gone.
        self._copies = {place: self._copies[place] for place in self._arrays}
        self._arrays, self._fields, self._states, self._actions = {}, [], [], []
