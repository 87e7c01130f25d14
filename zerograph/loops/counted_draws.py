"""The random numbers of a call that runs operator by operator: those that its graph draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zerograph import _torch
from zerograph._torch import TorchDispatchMode, pytree
from zerograph.capture import random_operators
from zerograph.eager.world import world
from zerograph.errors import CaptureError


class CountedDraws(TorchDispatchMode):
    """Draw by a number of torch's generator and the count of the operator, as a graph does.

    So a loop that resumes draws the same numbers, though its first calls run operator by operator again.

    Attributes:
        draws: the numbers of the last call that the mode has counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = random_operators.Draws(draw_seed=self._draw_seed)
        self._all = random_operators.table(self.draws)
        self._table: Mapping[Any, Callable[..., Any]] = {}

    def _draw_seed(self) -> torch.Tensor:
        # It compares the states of the ranks' generators, which is no save of the call's.
        table, seed = self._table, world().seed()
        self._table = table
        return torch.tensor(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        draw = self._table.get(func)
        if draw is None or any(isinstance(one, torch.Generator) for one in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        try:
            return draw(*args, **kwargs)
        except CaptureError:
            # The call is no graph either.
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def of_a_call(self) -> Iterator[None]:
        """Count inside the block, until torch's generator is saved or set, as ``torch.utils.checkpoint`` does.

        Its backward draws again, outside of the call, by the state of the generator.
        """

        def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self._table = {}
                return function(*args)

            return call

        self._table, self.draws.seed, self.draws.count = self._all, None, 0
        own: tuple[Callable[..., Any], ...] = (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)
        with _torch.replaced_generator(*map(uncounted, own)), self:
            yield
