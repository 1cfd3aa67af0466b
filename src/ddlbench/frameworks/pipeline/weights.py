"""The weights of a stage that stays full: the newest ones, and what minibatches in flight see."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

Version = Mapping[str, nn.Parameter]  # name in the stage -> weight, whose gradient is this version's own


class Weights:
    """Weight stashing (Narayanan et al. 2019, section 3.3): the newest weights, which the optimizer updates, and older
    ones that batches in flight still need.

    Weights are copied when the optimizer would overwrite what a batch in flight needs, not before: with n batches in
    flight there are never more than n + 1 sets, the newest included.
    """

    def __init__(self, model: nn.Module) -> None:
        self.newest: Version = dict(model.named_parameters())
        self.in_use = self.newest
        names = {id(parameter): name for name, parameter in self.newest.items()}
        # Where the module keeps each; a parameter tied within the stage has several places.
        self.places = [
            (module, attribute, names[id(parameter)])
            for module in model.modules()
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def version(self, optimizer: Optimizer, rates: Sequence[float]) -> Version:
        """What a new minibatch sees: the newest weights as they are; `copy_newest` protects them from later updates.

        rates: learning rates of the updates that will be made before the minibatch's own
        """
        return {name: nn.Parameter(newest.data, newest.requires_grad) for name, newest in self.newest.items()}

    def use(self, version: Version) -> None:
        """The module computes with this version from now on: forward, and where it recomputes, backward."""
        if version is not self.in_use:
            for module, attribute, name in self.places:
                setattr(module, attribute, version[name])
            self.in_use = version

    def copy_newest(self) -> None:
        """Copy the newest weights to new memory, before an update that the versions in flight must not see."""
        for newest in self.newest.values():
            newest.data = newest.data.clone()

    def take_gradients(self, version: Version) -> None:
        """Make the gradient of this version that of the newest weights."""
        for name, newest in self.newest.items():
            newest.grad, version[name].grad = version[name].grad, None

    def backward(self, age: int) -> AbstractContextManager[object]:
        """Around a backward pass. age: updates made since its minibatch was admitted"""
        return nullcontext()

    @contextmanager
    def updating(self, in_flight: bool) -> Generator[None]:
        """Around an update. in_flight: versions are still needed"""
        if in_flight:
            self.copy_newest()
        yield

    def rate(self, rate: float, updates: int) -> float:
        """The learning rate of this stage's update after so many. rate: the loop's"""
        return rate

    def state(self) -> dict[str, Tensor]:
        """Beside the newest weights, what later updates depend on."""
        return {}
