"""A tied model under data, tensor and pipeline parallelism at once: both stages keep the shared parameter in one layout."""

from __future__ import annotations

import pytest

import autopar
from autopar import Parallelism
from cost_models import Cluster
from tests.support import models


@pytest.mark.parametrize("zero", [0, 1])
def test_data_tensor_and_pipeline_together(zero: int) -> None:
    model, inputs = models.gpt2(4)
    forced = Parallelism(data=2, tensor=2, pipeline=2, zero=zero, schedule="1f1b", micro_batch_size=2)
    plan = autopar.plan(model, Cluster.local(8), inputs, parallelism=forced)
    assert [stage.mesh.num_devices for stage in plan.stages] == [4, 4]
    found = autopar.verify(model, plan, inputs, count_collectives=True)
    assert found.passed, str(found)
