"""Weight stashing: several versions of a stage's weights at once (Narayanan et al. 2019, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Version = Mapping[str, nn.Parameter]  # name in the stage -> weight, whose gradient is this version's own


class Weights:
    """The newest weights, which the optimizer updates, and older ones that batches in flight still need.

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

    def version(self) -> Version:
        """The newest weights as they are now. `copy_newest` keeps them so while others are updated."""
        return {name: nn.Parameter(newest.data, newest.requires_grad) for name, newest in self.newest.items()}

    def use(self, version: Version) -> None:
        """The module computes with this version from now on: forward, and where it recomputes, backward."""
        if version is not self.in_use:
            for module, attribute, name in self.places:
                setattr(module, attribute, version[name])
            self.in_use = version

    def copy_newest(self) -> None:
        """The newest weights move to memory of their own, before an update that versions given out must not see."""
        for newest in self.newest.values():
            newest.data = newest.data.clone()

    def take_gradients(self, version: Version) -> None:
        """What a version's backward passes left becomes the gradient of the newest weights."""
        for name, newest in self.newest.items():
            newest.grad, version[name].grad = version[name].grad, None
