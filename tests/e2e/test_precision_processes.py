"""bfloat16 with float32 masters on two real processes: training, checkpoints, models on meta, what is sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.options import PRECISIONS
from tests.e2e import precision_worker as worker
from tests.support.precision import micro_batches_of, train_alone

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_train_as_one_device_does(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.e2e.precision_worker", str(tmp_path)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    results = [torch.load(tmp_path / f"result-{rank}", weights_only=False) for rank in range(2)]
    model, batch = worker.make_model()
    batches = micro_batches_of(batch, worker.BATCH // worker.MICRO_BATCH)
    expected = train_alone(model, batches, PRECISIONS[worker.POLICY], num_steps=worker.STEPS)
    norm = torch.nn.utils.get_total_norm(list(expected.gradients.values()))
    for result in results:
        torch.testing.assert_close(result["losses"], list(expected.losses), rtol=1e-3, atol=0.0)
        assert result["losses"][-1] < result["losses"][0]
        torch.testing.assert_close(result["norms"][0], norm, rtol=1e-2, atol=0.0)
        for name, master in expected.masters.items():
            assert result["states"][name].dtype == torch.float32
            torch.testing.assert_close(result["states"][name], master, rtol=0.0, atol=0.1 * worker.STEPS * 1e-2)
            assert torch.equal(result["loaded"][name], result["states"][name]), name
        torch.testing.assert_close(*result["next"], rtol=1e-3, atol=0.0)
        assert result["meta_dtypes"] == {torch.float32}
    assert results[0]["sent"] == results[0]["planned"] != {}
