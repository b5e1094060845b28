"""Several machines, in threads: the bits of one process with as many ranks, on every machine."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from llmq_nb.comm.cluster import Cluster, Ended, open_cluster
from llmq_nb.comm.link import Pull
from llmq_nb.comm.wire import split
from llmq_nb.config import Config
from llmq_nb.core.errors import EXIT_USER, UserError
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import model_parameters
from llmq_nb.train.engine import make_engine
from llmq_nb.train.initial import set_random_weights, set_weights
from tests.comm.harness import MODEL, STORAGE, TIED, batch, config_of, plain
from tests.comm.machines import on_machines
from tests.model.harness import random_weights
from tests.offload.harness import finished


def spread(config: Config, machines: int) -> Config:
    """The ranks of a config over machines."""
    devices = (0,) * (config.world_size // machines)
    parallel = dataclasses.replace(config.parallel, devices=devices, machines=machines)
    return dataclasses.replace(config, parallel=parallel)


def run(config: Config, machines: int, model: ModelConfig = MODEL) -> tuple[list[Any], int]:
    """What `harness.run` gives, from each machine, and the bytes that crossed."""
    config = spread(config, machines)

    def work(cluster: Cluster) -> Any:
        engine: Any = make_engine("cpu", config, model, cluster=cluster)
        set_weights(engine, iter(random_weights(model, model_parameters(model), 1)))
        results = []
        for step in range(2):
            r = engine.train_step(
                batch(config, model, step), step=step, updates=step, learning_rate=1e-2
            )
            assert r.finite
            results.append((r.loss, r.grad_norm, r.lse_max))
        return finished(engine, results, batch(config, model, 0))

    found, hall = on_machines(machines, work)
    return found, hall.sent


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("gradients", [False, True])
def test_two_machines_have_the_bits_of_two_ranks(storage: str, gradients: bool):
    found, sent = run(config_of(storage, 2, gradients=gradients), 2)
    assert found == [plain(storage, 2, gradients, 2)] * 2
    assert sent > 0


@pytest.mark.parametrize(("ranks", "machines"), [(4, 2), (6, 3), (3, 3), (7, 7)])
def test_ranks_of_machines_have_the_bits_of_as_many_ranks(ranks: int, machines: int):
    """7 ranks: the small tensors have no shard on the last ones, and fewer runs."""
    for gradients, accumulation in ((False, 1), (True, 2)):
        options: Any = dict(gradients=gradients, accumulation=accumulation)
        found, _ = run(config_of("bf16, fp32 master", ranks, **options), machines)
        assert found == [plain("bf16, fp32 master", ranks, gradients, accumulation)] * machines


def test_states_on_the_host_and_recomputation_are_each_machines_own():
    levers: Any = dict(offload=("m", "v", "residual"), recompute=("block",), gradients=True)
    found, _ = run(config_of("bf16, fp32 master", 4, **levers), 2)
    assert found == [plain("bf16, fp32 master", 4, True, 2)] * 2


def test_what_crosses_in_a_step_is_what_the_sums_and_weights_need():
    """Each of R ranks takes its part of N gradients from all ranks, and of N weights what it lacks:
    over two machines R/2 ranks * N/R elements * R/2 senders, each way, twice."""
    for ranks in (2, 4):
        config = spread(config_of("bf16", ranks, accumulation=1), 2)

        def work(cluster: Cluster, config: Config = config) -> int:
            engine: Any = make_engine("cpu", config, TIED, cluster=cluster)
            set_random_weights(engine, TIED)
            engine.train_step(batch(config, TIED, 0), step=0, updates=0, learning_rate=1e-2)
            return sum(s.weight.size for s in engine.states)

        (count, _), hall = on_machines(2, work)
        norms = 2 * (ranks // 2) ** 2 * 4 * len(model_parameters(TIED))
        assert hall.sent == 2 * (ranks // 2) * count * 2 + norms


def test_reading_a_shard_of_another_machine_and_writing_all_of_them():
    config = spread(config_of("bf16, fp32 master", 4), 2)

    def work(cluster: Cluster) -> None:
        engine: Any = make_engine("cpu", config, TIED, cluster=cluster)
        rng = np.random.default_rng(0)
        for state in engine.states:
            for tensor in (state.master, state.m, state.v, state.weight):
                array = rng.standard_normal(tensor.shape).astype(tensor.dtype.numpy)
                engine.write(tensor, array)
                assert engine.read(tensor).tobytes() == array.tobytes()
                part = tensor.rows(0, tensor.shape[0] // 2)
                assert engine.read(part).tobytes() == array[: tensor.shape[0] // 2].tobytes()

    on_machines(2, work)


def test_the_seed_gives_the_same_weights_on_any_number_of_machines():
    def work(cluster: Cluster) -> Any:
        config = spread(config_of("bf16", 2 * cluster.size), cluster.size)
        engine: Any = make_engine("cpu", config, TIED, cluster=cluster)
        set_random_weights(engine, TIED)
        return [engine.read(s.weight).tobytes() for s in engine.states]

    alone = work(Cluster())
    for machines in (2, 3):
        assert on_machines(machines, work)[0] == [alone] * machines


def test_a_gradient_that_is_not_finite_stops_the_update_on_every_machine():
    """The NaN is in a weight of the second machine's memory alone."""
    config = spread(config_of("bf16, fp32 master", 2), 2)

    def work(cluster: Cluster) -> Any:
        engine: Any = make_engine("cpu", config, TIED, cluster=cluster)
        set_random_weights(engine, TIED)
        weight = engine.states[-2].weight
        if not cluster.leads:
            array = engine.read(weight)
            array[..., -1] = np.nan
            engine.write(weight, array)
        before = [engine.read(t).tobytes() for s in engine.states for t in (s.master, s.m, s.v)]
        r = engine.train_step(batch(config, TIED, 0), step=0, updates=0, learning_rate=1e-2)
        after = [engine.read(t).tobytes() for s in engine.states for t in (s.master, s.m, s.v)]
        return r.finite, r.non_finite_tensor, before == after

    (first, second), _ = on_machines(2, work)
    assert first == second and first[0] is False and first[1] is not None and first[2]


# ---- the words around a step -------------------------------------------------------------------
def test_all_processes_name_the_parcels_between_two_in_one_order():
    """Each ordered pair of four machines: what one sends is what the other one expects."""
    pulls = [
        [Pull(1000 * t + s, 2000 * s + t, 10 * t + s + 1, s) for s in (3, 0, 2, 1)]
        for t in range(4)
    ]
    seen = [split(pulls, range(r, r + 1)) for r in range(4)]
    for a, b in itertools.permutations(range(4), 2):
        sent = [p.nbytes for p in seen[a].parcels if p.sends and p.there == b]
        taken = [p.nbytes for p in seen[b].parcels if not p.sends and p.there == a]
        assert sent == taken == [10 * b + a + 1]
    for rank, phase in enumerate(seen):
        assert [p.source for p in phase.pulls[0]] == [2000 * rank + rank]
        assert all(p.rank == 0 for p in phase.pulls[0]), "links number the ranks of a machine"
        assert {p.address for p in phase.parcels if p.sends} == {
            2000 * rank + t for t in range(4) if t != rank
        }


def test_the_first_process_works_and_all_get_the_result():
    done = []

    def work(cluster: Cluster) -> Any:
        def once() -> str:
            done.append(cluster.index)
            return "result"

        return cluster.first(once), cluster.gather(cluster.index)

    assert on_machines(3, work)[0] == [("result", [0, 1, 2])] * 3
    assert done == [0]


@pytest.mark.parametrize("failing", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_an_error_is_said_by_one_process_and_ends_all(failing: tuple[int, ...]):
    def work(cluster: Cluster) -> Any:
        try:
            with cluster.guard():
                if cluster.index in failing:
                    raise UserError(f"from {cluster.index}")
                cluster.gather(None)
        except UserError as error:
            return str(error)
        except Ended as ended:
            return ended.code
        raise AssertionError("nothing ended it")

    found, _ = on_machines(3, work)
    assert found == [f"from {i}" if i == failing[0] else 2 for i in range(3)]


def test_an_error_in_inner_and_outer_guards_is_told_once():
    def work(cluster: Cluster) -> str:
        try:
            with cluster.guard(), cluster.guard():
                if cluster.leads:
                    raise KeyError("ours")
                cluster.gather(None)
        except (KeyError, Ended) as error:
            return repr(error)
        raise AssertionError("nothing ended it")

    assert on_machines(2, work)[0] == ["KeyError('ours')", "Ended(1)"]


def test_a_machine_with_other_data_is_named():
    def work(cluster: Cluster) -> str:
        with pytest.raises(UserError) as error:
            cluster.same("windows", 10 + (cluster.index == 2), "use one folder")
        return str(error.value)

    line = "windows: 11 on machine 2, 10 on machine 0 in several machines: use one folder"
    assert on_machines(3, work)[0] == [line] * 3


def test_no_launcher_is_one_process():
    assert not open_cluster({}).several
    assert not open_cluster({"PMI_SIZE": "1"}).several
    assert not open_cluster({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}).several  # an sbatch script


def test_srun_without_mpi_is_said():
    with pytest.raises(UserError, match="srun --mpi=pmi2"):
        open_cluster({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"})
    with pytest.raises(Ended) as silent:  # the others leave the word to the first
        open_cluster({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert silent.value.code == EXIT_USER


def test_an_error_in_the_middle_of_a_gather_does_not_begin_another(
    monkeypatch: pytest.MonkeyPatch,
):
    """A signal that ends the wait at once: the others have this process's half of a word."""
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    monkeypatch.setattr("llmq_nb.comm.cluster._end", lambda *_: None)

    class Cut:
        index, size, gathers = 0, 2, 0

        def abort(self, code: int) -> None: ...

        def gather(self, status: int, data: bytes, seconds: float | None = None) -> list[bytes]:
            self.gathers += 1
            raise KeyboardInterrupt

    post: Any = Cut()
    cluster = Cluster(post)
    with pytest.raises(KeyboardInterrupt), cluster.guard():
        cluster.gather(1)
    assert post.gathers == 1 and at_exit == [(post.abort, 130)]
