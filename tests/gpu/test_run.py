"""`umem run` on a GPU: the program finds the swap done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

UMEM = str(Path(sys.executable).with_name("umem"))

TRAIN = """
import json
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import umem
        return torch.full((4,), float(index)), umem.is_enabled()

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1 << 16).cuda()
    loader = torch.utils.data.DataLoader(
        Numbers(), 4, num_workers=1, multiprocessing_context="spawn")
    swapped_workers = 0
    for batch, swapped in loader:
        model(batch.cuda()).sum().backward()
        swapped_workers += int(swapped.sum())
    import umem
    from umem.runtime.state import runtime
    print(json.dumps({
        "backend": torch.cuda.get_allocator_backend(),
        "policy": runtime().policy.name,
        "ours": model.weight.data_ptr() in {it.address for it in umem.tensors()},
        "gradient_sum": model.weight.grad[0].sum().item(),
        "swapped_workers": swapped_workers,
    }))
"""


def umem_run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UMEM_")}
    return subprocess.run(
        [UMEM, "run", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=kept | {"UMEM_MANAGED_LIMIT": "2GiB"} | variables,
    )


@pytest.mark.parametrize(
    ("words", "variables", "policy"),
    [
        (["--policy", "lora", "train.py"], {}, "lora"),
        (["-m", "train"], {"UMEM_POLICY": "rmm-managed"}, "rmm-managed"),
    ],
)
def test_program_trains_under_umem(
    tmp_path: Path, words: list[str], variables: dict[str, str], policy: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)

    done = umem_run(tmp_path, *words, **variables)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "backend": "pluggable",
        "policy": policy,
        "ours": True,
        "gradient_sum": 4.0 * sum(range(8)),
        "swapped_workers": 0,
    }


def test_program_that_enables_umem_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import umem\numem.enable('sft')\n")

    done = umem_run(tmp_path, "train.py")

    assert done.returncode == 1
    assert "EnableError: umem is enabled already" in done.stderr
    assert "leave out `umem run`" in done.stderr


def test_exception_and_exit_status_leave_cleanly(tmp_path: Path) -> None:
    source = "import torch\nx = torch.ones(1 << 20, device='cuda')\nraise RuntimeError('stop')\n"
    (tmp_path / "train.py").write_text(source)

    done = umem_run(tmp_path, "train.py")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: stop"


STEPS = """
import os
import subprocess
import sys
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
subprocess.run([sys.argv[1], "top", str(os.getpid()), "--json"], check=True)
"""


def test_a_training_says_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)

    done = umem_run(
        tmp_path, "train.py", UMEM, UMEM_DEVICE_BUDGET="2GiB", XDG_RUNTIME_DIR=str(tmp_path)
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    (device,) = figures["devices"]
    assert device["budget_bytes"] == 2 << 30
    assert device["classes"]["weights"]["device"] >= 8 * 4 * 1024 * 1024
    (run,) = figures["runs"]
    assert (run["model"], run["late"]) == ("Sequential", 0)
    assert 0 < run["planned"] < run["count"] <= 30
    said = done.stderr.splitlines()
    assert len([line for line in said if line.startswith("umem: plan 1: state of ")]) == 1
    counts = f"umem: {run['count']} steps of Sequential, {run['planned']} of"
    (place,) = (number for number, line in enumerate(said) if line.startswith(counts))
    assert "predicted" in said[place + 1]
    assert re.fullmatch(
        r"umem: NVML: (GPU 0|this process) has [\d.]+ [MG]iB .*, of a budget of 2 GiB; .*", said[-1]
    )
    assert list((tmp_path / "umem").iterdir()) == []
