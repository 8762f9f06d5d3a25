"""Layers that keep copies of their weights in eight bits: no bit changes under streaming."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from streamed_models import Cached
from streamed_programs import WIDTH, bits
from torch import nn


@pytest.mark.slow
@pytest.mark.parametrize("offloads", [False, True])
def test_activations_are_copied_where_no_other_offload_is_on(
    offloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own CPU offload puts hooks on saved tensors around the call of each layer."""

    def run(streams: Streams | None) -> Any:
        torch.manual_seed(0)
        model = Cached()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own_offload: Any = torch.autograd.graph.save_on_cpu if offloads else nullcontext
        seen: list[Any] = []
        with streaming(streams, monkeypatch):
            for step in range(8):
                optimizer.zero_grad()
                for batch in range(2):
                    generator = torch.Generator().manual_seed(2 * step + batch)
                    with own_offload():
                        loss = model(torch.randn(64, WIDTH, generator=generator)).square().mean()
                    loss.backward()
                    seen.append(loss.detach())
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
            return bits([*seen, *model.parameters(), model.state_dict()])

    streams = Streams()
    assert run(streams) == run(None)
    (training,) = streams.trainings
    assert training.counts.streamed > 1
    status = training.status().tuning
    assert status is not None
    counts = status.activations
    if offloads:
        assert counts.tensors_out == 0
    else:  # of what autograd saves, the caches are still there
        assert counts.tensors_out > counts.tensors_in > 0
    assert counts.late_fetches == 0
