"""Units whose updates the host's cores make, because their state is at home for good.

No state of such a unit crosses the link. Its gradients have left in the backward pass already
(``copied_gradients.py``). ``step()`` copies the weights out and returns; the host updates the copy
and the state; then the copy comes back. Until then parameters, gradients and state have their
guards, as in any deferred update. Who waits for the unit waits in its own thread for the host, and
on its stream for the copy back.

Weights leave anew in each step, after all that the program does to them: no version tells of a
write through ``p.data``, or of a kernel that has an address.

What the device computes for an update, as the factor of clipping and what a gradient scaler has
found, leaves beside the weights, so that nothing waits for it but the host's thread. Counts of
steps change where they are.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import increment_version

from umem.core.classes import TensorClass
from umem.core.interrupts import call_all
from umem.runtime.guard import are_plain
from umem.runtime.unguarded import Unguarded, addresses_of, allowed
from umem.streaming.gradients.clipped_gradients import ClippedGradients, multiply
from umem.streaming.host_share.forms import Hyperparameters
from umem.streaming.host_share.host_update import HostSpan
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Copy, Lane, Lanes, Moment
from umem.streaming.step.call import ParameterGroups, StepCall
from umem.streaming.step.unit import StreamedUnit
from umem.torch_compat import InferenceMode, foreach_add, foreach_subtract

__all__ = ["HostUnits", "HostUpdater", "HostWork"]

_STATE = (frozenset(("step", "exp_avg", "exp_avg_sq")), frozenset(("momentum_buffer",)))
"""Names of the state that the host updates, of Adam and of SGD."""


_MOST_REFUSALS = 4
"""Steps one after another none of whose updates the host could make."""

_WITHIN_FLOAT32 = (torch.float32, torch.bfloat16)
"""Types whose numbers float32 has, too."""


class HostUpdater(Protocol):
    """Updates elements at home, as :class:`~umem.streaming.host_share.HostUpdate` does."""

    def covers(self, settings: Hyperparameters, dtype: torch.dtype) -> bool:
        """Whether updates of a kind have the device's bits."""

    def update(
        self,
        spans: Sequence[HostSpan],
        settings: Callable[[], Hyperparameters],
        dtype: torch.dtype,
    ) -> Future[None]:
        """Queue an update; updates run one after the other."""

    def close(self) -> None:
        """End, behind what is queued."""


class _Numbers:
    """Numbers of a device, which the host reads when they have arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self.home: torch.Tensor | None = None

    def add(self, value: Any) -> Callable[[], float]:
        """Add a number, or a tensor of one; returns what reads it later."""
        if not isinstance(value, torch.Tensor) or value.device != self.device:
            known = float(value)
            return lambda: known
        place = len(self.tensors)
        self.tensors.append(value)
        return lambda: self._read(place)

    def leave(self) -> bool:
        """Copy them to the host behind the current stream's work; returns whether they can be."""
        if any(it.dtype not in _WITHIN_FLOAT32 for it in self.tensors):
            return False
        if self.tensors:
            every = torch.stack([it.reshape(()).float() for it in self.tensors])
            # The allocator's own homes are for larger tensors: it has small ones on the device.
            self.home = torch.empty(
                len(every), dtype=torch.float32, device="cpu", pin_memory=every.is_cuda
            )
            self.home.copy_(every, non_blocking=True)
        return True

    def _read(self, place: int) -> float:
        assert self.home is not None
        (address,) = addresses_of((self.home,))
        return ctypes.c_float.from_address(address + place * self.home.itemsize).value


class _Part(NamedTuple):
    """The update of one parameter."""

    parameter: Any
    gradient: torch.Tensor
    number: int
    """Of its group."""
    values: Mapping[str, torch.Tensor]
    """Its state, unguarded."""
    factors: tuple[Any, ...]
    span: HostSpan
    settings: Callable[[], Hyperparameters]
    """Of the update, when all has arrived."""


class HostWork:
    """The host's update of a unit, from ``step()`` until something waits for it.

    Parameters
    ----------
    unit, parts
        The unit, and what is updated of it.
    lanes
        Where copies run.
    updater
        The host.
    call
        The hyperparameters.
    left
        The moment after the copies of the weights.
    on_error
        Called with an error of the host's, behind which the device has made the update.
    """

    def __init__(
        self,
        unit: StreamedUnit,
        parts: list[_Part],
        lanes: Lanes,
        updater: HostUpdater,
        call: StepCall,
        left: Moment,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._unit, self._parts, self._lanes, self._updater = unit, parts, lanes, updater
        self._call, self._left, self._on_error = call, left, on_error
        self._futures: list[Future[None]] = []
        self.updated: Moment = None
        """The moment after the copies back; None while nothing has waited for the host."""

    def submit(self) -> None:
        """Queue the updates. What an interrupt cuts short, another call completes."""
        for it in self._parts[len(self._futures) :]:
            dtype = it.gradient.dtype
            self._futures.append(self._updater.update([it.span], it.settings, dtype))

    def is_done(self) -> bool:
        """Whether nobody has to wait for the host."""
        is_queued = len(self._futures) == len(self._parts)
        return self.updated is not None or (is_queued and all(it.done() for it in self._futures))

    def end(self) -> None:
        """Wait for the host in this thread, and queue the copies back."""
        unit, lanes = self._unit, self._lanes
        if self.updated is not None:
            return
        self.submit()
        errors = list(map(_error_of, self._futures))
        pairs = list(zip(self._parts, errors, strict=True))
        copies = [
            Copy(addresses_of((it.parameter,))[0], it.span.weight, it.parameter.nbytes)
            for it, error in pairs
            if error is None
        ]
        come = partial(lanes.copy, Lane.WEIGHTS_IN, copies, TensorClass.WEIGHTS)
        updated = lanes.run(Lane.WEIGHTS_IN, come, [self._left])
        failed = [it for it, error in pairs if error is not None]
        if failed:
            work = partial(self._update_in_place, failed)
            updated = lanes.run(Lane.UPDATE, work, [updated], self._call.tensors)
        call_all(  # not before: what an interrupt cuts short is done again
            partial(setattr, unit, "updated", updated),
            partial(setattr, self, "updated", updated),
            partial(setattr, unit, "host_work", None),
        )
        self._parts = []  # which have the program's tensors
        for error in filter(None, errors):
            self._on_error(error)
            return

    def _update_in_place(self, parts: Sequence[_Part]) -> None:
        """Have the device make updates that the host has not: nothing has changed but counts."""
        for it in parts:
            with allowed((it.parameter,)):
                made: Any = it.parameter.detach()
                made.grad = it.gradient.clone()
                multiply([made.grad], it.factors)
                values = dict(it.values)
                if "step" in values:
                    values["step"] = values["step"] - 1
                self._call.run(self._call.shadow([(it.number, [made])], {made: values}))
                if self._call.unscales:
                    it.gradient.detach().copy_(made.grad)


def _error_of(future: Future[None]) -> Exception | None:
    try:
        future.result()
    except Exception as error:
        return error
    return None


class HostUnits:
    """Queues the updates that the host makes.

    Parameters
    ----------
    lanes
        Where copies run.
    memory
        Homes.
    clipped
        Holds gradients that are on the host.
    on_error
        Called with an error of the host's.
    make_updater
        Makes what updates; None where no update of the optimizer can be the host's.
    """

    def __init__(
        self,
        lanes: Lanes,
        memory: StateMemory,
        clipped: ClippedGradients,
        on_error: Callable[[Exception], None],
        make_updater: Callable[[], HostUpdater | None],
    ) -> None:
        self.updater: HostUpdater | None = None
        """The host; None to have the device make all updates."""
        self.may_update = True
        """Not where the host cannot make this program's updates."""
        self._lanes, self._memory, self._clipped = lanes, memory, clipped
        self._on_error, self._make_updater = on_error, make_updater
        self._under_way: deque[HostWork] = deque()
        self.asked = 0
        """Updates of the present step that a plan has the host make."""
        self._begun = 0
        """Those it has begun."""
        self._refusals = 0
        """Steps one after another none of whose updates the host could make."""

    def prepare(self) -> bool:
        """Make the host ready, and return whether it can make updates."""
        if self.updater is None and self.may_update:
            self.updater = self._make_updater()
            self.may_update = self.updater is not None
        return self.may_update

    def begin(self) -> None:
        """Begin a step."""
        if self.asked:
            self._refusals = 0 if self._begun else self._refusals + 1
            self.may_update &= self._refusals < _MOST_REFUSALS
        self.asked = self._begun = 0
        self._under_way.clear()

    def close(self) -> None:
        """End the host's threads. No update is under way."""
        if self.updater is not None:
            self.updater.close()
            self.updater = None

    def hold_again(self, gradients: Sequence[torch.Tensor]) -> None:
        """Hold gradients at home that the program has used there, as a gradient scaler does."""
        for it in gradients:
            if are_plain((it,)) and self._memory.is_home(it):
                self._clipped.keep_here(it)

    def fetch(self) -> None:
        """Queue the copies back of units that the host is done with."""
        while self._under_way and self._under_way[0].is_done():
            self._under_way[0].end()
            self._under_way.popleft()

    def all_updated(self, last: Moment, lock: AbstractContextManager[Any]) -> Any:
        """The moment after a step's updates, `last` of the device's; a function if it comes later.

        Nothing waits for the host until that is called.
        """
        works, lanes = list(self._under_way), self._lanes
        if not works:
            return last

        def wait() -> Moment:
            with lock:
                for work in works:
                    work.end()
                every = [work.updated for work in works] + ([] if last is None else [last])
                return lanes.run(Lane.WEIGHTS_IN, lambda: None, every)

        return wait

    def launch(
        self,
        unit: StreamedUnit,
        part: ParameterGroups,
        call: StepCall,
        note: Callable[[], object],
    ) -> bool:
        """Queue a unit's update, if the host's has the device's bits.

        Parameters
        ----------
        unit
            A unit with all state at home.
        part
            The parameters that are updated. Their gradients are held in host memory.
        call
            The hyperparameters.
        note
            A function of C, called when there is no way back.

        Returns
        -------
        bool
            False if the device has to make the update: nothing has changed.
        """
        updater = self.updater
        if updater is None or not part:
            return False
        with Unguarded(), InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(False)
            numbers = _Numbers(part[0][1][0].device)
            moments: list[Moment] = []
            parts = self._parts(updater, unit, part, call, numbers, moments)
            if parts is None or not numbers.leave():
                return False
            copies = [
                Copy(it.span.weight, addresses_of((it.parameter,))[0], it.parameter.nbytes)
                for it in parts
            ]
            allocated = self._lanes.mark()  # before, new homes are the program's stream's
            moments.append(allocated)
            leave = partial(self._lanes.copy, Lane.WEIGHTS_OUT, copies, TensorClass.WEIGHTS)
            left = self._lanes.run(Lane.WEIGHTS_OUT, leave, [call.ready, allocated])
            moments.append(left)
            work = HostWork(unit, parts, self._lanes, updater, call, left, self._on_error)
            counts = [it.values["step"] for it in parts if "step" in it.values]
            changes: list[Callable[[], object]] = []
            if counts:
                changes = [partial(foreach_add, counts, 1)]
                if call.found_inf is not None:  # a skipped step does not count
                    skipped = [call.found_inf] * len(counts)
                    changes.append(partial(foreach_subtract, counts, skipped))
            call_all(*changes, partial(setattr, unit, "host_work", work), note)
            for piece in unit.pieces:  # other streams wait for the counts
                piece.returned = self._lanes.mark()
        self._under_way.append(work)
        self._begun += 1
        work.submit()
        unfused = [it.parameter for it in parts if not call.fuses(it.number)]
        if unfused:  # fused kernels do not count
            increment_version(unfused)
        return True

    def _parts(
        self,
        updater: HostUpdater,
        unit: StreamedUnit,
        part: ParameterGroups,
        call: StepCall,
        numbers: _Numbers,
        moments: Sequence[Moment],
    ) -> list[_Part] | None:
        """The update of each parameter; None if the host cannot make one of them."""
        assert unit.state is not None
        shadow = call.shadow(part, {})
        scaler = [None if it is None else numbers.add(it) for it in (call.scale, call.found_inf)]
        has_scaler = scaler != [None, None]
        homes, found = set(map(id, unit.state.homes)), []
        for (number, some), group in zip(part, shadow.param_groups, strict=True):
            settings = Hyperparameters(group, 1, grad_scale=1.0 if call.unscales else None)
            dtypes = {it.dtype for it in some}
            if has_scaler and not call.fuses(number):
                return None
            if not all(updater.covers(settings, it) for it in dtypes):
                return None
            rate = numbers.add(group["lr"])
            for parameter in some:
                gradient, values = parameter.grad, unit.state.known[parameter]
                averages = [it for name, it in values.items() if name != "step"]
                every = [parameter, gradient, *averages]
                factors = self._clipped.factors(gradient)
                by = {it.dtype for it in factors if isinstance(it, torch.Tensor)}
                may_run = (
                    values.keys() in _STATE
                    and all(isinstance(it, torch.Tensor) for it in values.values())
                    and all(id(it) in homes for it in averages)
                    and not self._memory.is_home(parameter)
                    and all(it.dtype is parameter.dtype and it.is_contiguous() for it in every)
                    and all(it.numel() == parameter.numel() for it in every)
                    # A tensor of another type may be rounded to the gradient's first.
                    and by <= {gradient.dtype}
                    # The quotient by a scale becomes the gradient; products do not.
                    and not (factors and call.unscales)
                )
                home = self._home_of(unit, parameter) if may_run else None
                if home is None:
                    return None
                own = {name: it.detach() for name, it in values.items()}
                # In the order of a span: "exp_avg" comes before "exp_avg_sq".
                averages = [own[name] for name in sorted(own.keys() - {"step"})]
                found_at = *addresses_of([home, gradient, *averages]), 0  # SGD has one average
                weight, of_gradient, first, second = found_at[:4]
                span = HostSpan(weight, of_gradient, first, second, parameter.numel())
                wait = _settings(
                    self._lanes,
                    moments,
                    group,
                    numbers.add(own.get("step", 0)),
                    rate,
                    list(map(numbers.add, factors)),
                    *scaler,
                )
                found.append(_Part(parameter, gradient, number, own, factors, span, wait))
        return found

    def _home_of(self, unit: StreamedUnit, parameter: Any) -> torch.Tensor | None:
        """Host memory for a parameter's weights, which the unit keeps."""
        home = unit.host_homes.get(parameter)
        if home is None or home.nbytes != parameter.nbytes:
            # Counted with the state beside it, whose homes are known as no memory of the device.
            home = self._memory.new_home(parameter.detach(), TensorClass.OPTIMIZER_STATE)
            if home is not None:
                unit.host_homes[parameter] = home
        return home


def _settings(
    lanes: Lanes,
    moments: Sequence[Moment],
    group: Mapping[str, Any],
    count: Callable[[], float],
    rate: Callable[[], float],
    factors: Sequence[Callable[[], float]],
    scale: Callable[[], float] | None,
    found_inf: Callable[[], float] | None,
) -> Callable[[], Hyperparameters]:
    """What the host calls ahead of a parameter's update, in its own thread."""
    claims = [True]

    def wait() -> Hyperparameters:
        for moment in moments:
            lanes.finish(moment)
        try:
            is_first = claims.pop()
        except IndexError:  # an interrupt had it queued twice
            is_first = False
        return Hyperparameters(
            {**group, "lr": rate()},
            int(count()) + 1,
            factors=[it() for it in factors],
            grad_scale=None if scale is None else scale(),
            found_inf=not is_first or bool(found_inf is not None and found_inf()),
        )

    return wait
