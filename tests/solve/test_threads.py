"""Small systems run on one thread, large ones on the caller's threads, whose number is restored afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import helmscope as hs
from helmscope.solve.threads import SMALL, fitting_threads, largest_matrix

SA = hs.SA(beta=4.0)


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Watched:
    """SA, and how many threads it was evaluated with."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(torch.get_num_threads())
        return SA.velocity(x)


def test_a_small_run_takes_one_thread_and_gives_them_back():
    field, x0 = Watched(), hs.Uniform(n=32, dim=3).sample(batch=2, seed=0)
    hs.integrate(field, x0, [0.1], progress=lambda share: None)
    field.seen.discard(3)  # the check of what the field gives
    assert field.seen == {1}
    assert torch.get_num_threads() == 3


def test_a_large_run_keeps_the_threads_of_the_caller():
    field, x0 = Watched(), hs.Uniform(n=513, dim=3).sample(seed=0)
    hs.integrate(field, x0, [0.001], stepper=hs.RK4(0.001))
    assert field.seen == {3}


def test_phase_diagrams_take_one_thread():
    fields = {}
    hs.phase_diagram(
        lambda beta: fields.setdefault(beta, Watched()),
        betas=[1.0],
        times=[0.1],
        start=hs.Uniform(n=4, dim=3),
        samples=2,
        stepper=hs.RK4(0.1),
    )
    assert fields[1.0].seen - {3} == {1}
    assert torch.get_num_threads() == 3


def test_the_number_comes_back_after_an_error_and_from_within():
    class Broken(RuntimeError):
        pass

    def broken(x: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() == 1:
            raise Broken
        return torch.zeros_like(x)

    with pytest.raises(Broken):
        hs.integrate(broken, torch.eye(3), [1.0])
    assert torch.get_num_threads() == 3
    with fitting_threads(SA, torch.eye(3)):
        hs.integrate(SA, torch.eye(3), [0.1])
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_other_python_threads_keep_theirs():
    begun, inside, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        torch.get_num_threads()  # each Python thread takes over the number of the process once
        torch.set_num_threads(2)
        begun.set()
        inside.wait(10)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(10)
    with fitting_threads(SA, torch.eye(3)):
        inside.set()
        thread.join(10)
    assert seen == [2]
    assert torch.get_num_threads() == 3


def test_bits_do_not_depend_on_the_threads_of_the_caller():
    x0 = hs.Uniform(n=32, dim=3).sample(batch=16, seed=0)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(hs.integrate(SA, x0, [0.5]).states)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("field", "shape", "entries"),
    [
        (SA, (16, 32, 3), 16 * 32 * 32),
        (SA, (2, 8, 2, 64), 2 * 8 * 2 * 64),
        (hs.MultiHead([SA, SA, SA]), (16, 32, 3), 3 * 16 * 32 * 32),
        (hs.MLP(w_in=torch.ones(100, 3), w_out=torch.ones(3, 100)), (16, 32, 3), 16 * 32 * 100),
        (hs.Block(SA, hs.MLP(w_in=torch.ones(8, 3), w_out=torch.ones(3, 8))), (32, 3), 32 * 32),
        (torch.zeros_like, (5, 3), 25),
    ],
)
def test_the_largest_matrix_of_a_field(field, shape, entries):
    assert largest_matrix(field, torch.empty(shape, device="meta")) == entries


def test_the_largest_matrix_of_two_clouds_has_the_pairs_of_both():
    field = hs.CrossAttention(1.0, hs.Uniform(n=50, dim=3).sample(seed=0))
    assert largest_matrix(field, torch.empty(2, 4, 3, device="meta")) == 2 * 4 * 50


def test_pieces_of_phase_diagrams_are_small():
    from helmscope.observe.phase_sweep import PAIRS

    assert PAIRS["cpu"] <= SMALL
