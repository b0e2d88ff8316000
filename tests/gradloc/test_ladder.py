from __future__ import annotations

import math

import pytest
import torch

from lightning_rlstab.gradloc.ladder import LadderSettings, localized

SHAPE = (4, 1, 4, 16)
# Tokens have gradients of about 0.01 and the step of 256 of them about 0.16: a spike is five times that.
THRESHOLD = 0.8
TAU = 0.8 * 16
USUAL = {"layers.0": 0.25, "layers.1": 0.25, "layers.2": 0.25, "head": 0.25}


def find(oracle, **settings):
    return localized(
        oracle, threshold=THRESHOLD, tau_token=TAU, settings=LadderSettings(**settings), usual_layers=USUAL
    )


def named(finding) -> set[tuple[int, ...]]:
    return {tuple(culprit.address) for culprit in finding.culprits}


def ratios_at(*addresses: tuple[int, int, int, int], log_ratio: float = 4.0) -> torch.Tensor:
    ratios = torch.zeros(SHAPE)
    for address in addresses:
        ratios[address] = log_ratio
    return ratios


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (3, 0, 3, 15), (1, 0, 2, 7)])
def test_one_token_is_named_with_its_share_norm_ratio_and_layers(oracle_of, place) -> None:
    finding = find(oracle_of({place: 10.0}, log_ratios=ratios_at(place)))
    assert finding.verdict == "tokens"
    assert (finding.tier, finding.backward_probes) == (2, 1)
    (culprit,) = finding.culprits
    assert tuple(culprit.address) == place
    assert finding.completeness == culprit.share == pytest.approx(1, abs=2e-3)
    assert culprit.grad_norm == pytest.approx(10.0, rel=1e-4)
    assert culprit.importance_ratio == pytest.approx(math.exp(4.0))
    assert culprit.cause == "token_mismatch"
    assert sum(share for _, share in culprit.layers) == pytest.approx(1.0)
    assert finding.is_removal_enough


def test_tokens_that_head_norms_point_to_are_measured_without_a_sweep_over_the_step(oracle_of) -> None:
    culprits = {(0, 0, 0, 0): 30.0, (1, 0, 1, 5): 3.0, (3, 0, 1, 7): 9.0}
    oracle = oracle_of(culprits)
    finding = find(oracle)
    assert named(finding) == set(culprits)
    assert oracle.rows_run == []
    assert finding.completeness == pytest.approx(1, abs=2e-3)
    shares = [float(oracle.gradients[c.address] @ oracle.whole / oracle.whole.square().sum()) for c in finding.culprits]
    assert [culprit.share for culprit in finding.culprits] == pytest.approx(shares)


def test_a_directional_search_always_takes_the_shares_of_all_tokens(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 2, 7): 10.0})
    finding = find(oracle, search="directional")
    assert oracle.rows_run[0] == 16
    assert finding.tier == 1
    assert finding.completeness == pytest.approx(1, abs=1e-3)


def test_where_the_head_norms_mislead_the_shares_answer_and_nothing_is_deducted_twice(oracle_of) -> None:
    loud, hidden = (0, 0, 0, 0), (2, 0, 1, 3)
    oracle = oracle_of({loud: 1.0, hidden: 10.0})
    gradients = oracle.gradients.clone()
    gradients[(*hidden, slice(48, 64))] *= 1e-3  # nothing to see in the head
    gradients[(*loud, slice(0, 48))] *= 1e-3
    oracle = type(oracle)(gradients)
    finding = find(oracle)
    assert named(finding) == {loud, hidden}
    assert finding.tier == 1
    assert finding.backward_probes == 4  # one in vain, the two, one miss
    clean = gradients.clone()
    clean[loud] = clean[hidden] = 0
    torch.testing.assert_close(oracle.remaining, clean.flatten(0, 3).sum(0), atol=1e-5, rtol=0)


def test_probes_that_were_in_vain_count_against_the_budget(oracle_of) -> None:
    loud, hidden = (0, 0, 0, 0), (2, 0, 1, 3)
    gradients = oracle_of({loud: 1.0, hidden: 10.0}).gradients.clone()
    gradients[(*hidden, slice(48, 64))] *= 1e-3
    gradients[(*loud, slice(0, 48))] *= 1e-3
    finding = find(type(oracle_of())(gradients), probe_budget=2)
    assert finding.backward_probes == 2
    assert named(finding) == {hidden}


def aligned(*, first: int, parts: int = 4) -> torch.Tensor:
    """A unit vector with the same weight in the first so many layers, the head being the fourth."""
    vector = torch.zeros(64)
    vector[[first + 16 * part for part in range(parts)]] = 1 / math.sqrt(parts)
    return vector


def noise(size: float = 0.01) -> torch.Tensor:
    return size * torch.randn((*SHAPE, 64), generator=torch.Generator().manual_seed(0)) / 8


@pytest.mark.parametrize("sizes", [(0.6,), (0.27, 0.27, 0.27)])
def test_a_loud_token_is_not_blamed_for_a_crowd_that_agrees(oracle_of, sizes: tuple[float, ...]) -> None:
    gradients = noise() + 0.95 * THRESHOLD * aligned(first=0) / 256
    for number, size in enumerate(sizes):
        gradients[number, 0, 2, 7] = size * THRESHOLD * aligned(first=1 + number)
    oracle = type(oracle_of())(gradients)
    assert oracle.grad_norm > THRESHOLD
    finding = find(oracle)
    assert finding.verdict == "diffuse"
    assert finding.culprits == ()
    torch.testing.assert_close(oracle.remaining, oracle.whole)


def test_a_second_culprit_that_hardly_shows_in_the_head_is_not_left_in_the_step(oracle_of) -> None:
    gradients = noise()
    gradients[0, 0, 0, 0] = THRESHOLD * aligned(first=1)
    gradients[2, 0, 1, 3] = 0.9 * THRESHOLD * aligned(first=2, parts=3)
    finding = find(type(oracle_of())(gradients))
    assert named(finding) == {(0, 0, 0, 0), (2, 0, 1, 3)}
    assert finding.tier == 1


def test_a_bad_sequence_that_a_few_tokens_carry_is_still_taken_as_a_whole(oracle_of) -> None:
    gradients, ratios = noise(), torch.zeros(SHAPE)
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[2, 0, 1, 9:] = False
    ratios[2, 0, 1], ratios[0, 0, 3, 2] = -2.0, 4.0
    gradients[2, 0, 1, :9] = 0.6 * aligned(first=1)
    gradients[0, 0, 3, 2] = 1.9 * aligned(first=2)
    finding = find(type(oracle_of())(gradients, log_ratios=ratios, mask=mask))
    assert finding.verdict == "sequence"
    assert finding.remaining_norm < 0.2


@pytest.mark.parametrize("case", ["systematic", "block", "unclear"])
def test_where_more_than_single_tokens_may_be_to_blame_the_shares_are_taken(oracle_of, case: str) -> None:
    place = (1, 0, 2, 7)
    options = {"log_ratios": torch.full(SHAPE, 0.3)} if case == "systematic" else {}
    gradients = oracle_of({place: 10.0}).gradients.clone()
    if case == "block":
        gradients[(*place, slice(16, 32))] *= 50
    if case == "unclear":  # nine tokens of one size: the eight largest hold eight ninths
        for token in range(9):
            gradients[0, 0, 0, token] = 10.0 * torch.roll(gradients[place] / gradients[place].norm(), token)
        gradients[place] *= 1e-3
    oracle = type(oracle_of())(gradients, **options)
    find(oracle)
    assert oracle.rows_run[0] == 16


def test_head_norms_that_lead_nowhere_cost_one_probe(oracle_of) -> None:
    gradients = noise()
    for token in range(8):
        gradients[0, 0, 0, token] = 0.4 * THRESHOLD * torch.roll(aligned(first=0, parts=4), token)
    gradients[2, 0, 1, 3] = 10 * aligned(first=12, parts=3)
    finding = find(type(oracle_of())(gradients), probe_budget=9)
    assert (2, 0, 1, 3) in named(finding)
    assert finding.backward_probes <= 9
    ample, without = (find(type(oracle_of())(gradients), search=search) for search in ("auto", "directional"))
    assert ample.backward_probes == without.backward_probes + 1


def test_what_failed_shares_deducted_is_not_deducted_again_by_the_bisection(oracle_of) -> None:
    gradients = noise()
    gradients[0, 0, 0, 0] = 0.7 * aligned(first=1)
    gradients[2, 0, 1, 3] = 3.0 * aligned(first=2, parts=3)
    oracle = type(oracle_of())(gradients, noise=0.3, is_base_reusable=False)
    finding = find(oracle)
    assert finding.tier == 3
    assert (2, 0, 1, 3) in named(finding)
    clean = gradients.clone()
    for address in named(finding):
        clean[address] = 0
    torch.testing.assert_close(oracle.remaining, clean.flatten(0, 3).sum(0), atol=1e-5, rtol=0)


def test_all_culprits_in_all_micro_batches_and_ranks_are_named_not_only_the_largest(oracle_of) -> None:
    culprits = {(0, 0, 0, 0): 30.0, (1, 2, 1, 5): 3.0, (1, 3, 0, 6): 2.5, (3, 1, 1, 7): 9.0, (2, 2, 0, 3): 2.0}
    finding = find(oracle_of(culprits, shape=(4, 4, 2, 8)))
    assert named(finding) == set(culprits)
    assert finding.culprits[0].address == (0, 0, 0, 0)
    assert finding.is_removal_enough
    assert finding.cost_sweeps < 2.0


def test_a_culprit_dwarfed_by_another_that_pulls_against_it_is_still_named(oracle_of) -> None:
    oracle = oracle_of({(0, 0, 0, 0): 40.0, (2, 0, 1, 3): 2.0})
    # Lean the small one a little against the large one, so that its share of the spike is about zero.
    large, small = oracle.gradients[0, 0, 0, 0], oracle.gradients[2, 0, 1, 3]
    small = small - (small @ large) / (large @ large) * large
    oracle.gradients[2, 0, 1, 3] = 2.0 * small / small.norm() - 0.05 * large / large.norm() * 2
    rebuilt = type(oracle)(oracle.gradients)
    finding = find(rebuilt)
    assert named(finding) == {(0, 0, 0, 0), (2, 0, 1, 3)}


def test_nobody_is_named_when_no_token_dominates(oracle_of) -> None:
    finding = find(oracle_of(size=0.5))
    assert finding.verdict == "diffuse"
    assert finding.culprits == ()
    assert finding.effective_tokens > 50
    assert not finding.is_removal_enough


def test_a_mismatch_of_every_token_is_systematic_and_nobodys_fault(oracle_of) -> None:
    finding = find(oracle_of(size=0.5, log_ratios=torch.full(SHAPE, 0.7)))
    assert finding.verdict == "systematic"
    assert finding.culprits == ()


def test_one_bad_token_amid_a_systematic_mismatch_is_still_named(oracle_of) -> None:
    ratios = torch.full(SHAPE, 0.3)
    ratios[1, 0, 1, 1] = 4.0
    finding = find(oracle_of({(1, 0, 1, 1): 9.0}, log_ratios=ratios))
    assert finding.verdict == "tokens"
    assert named(finding) == {(1, 0, 1, 1)}


def test_a_sequence_that_is_off_as_a_whole_is_taken_as_a_whole(oracle_of) -> None:
    ratios = torch.zeros(SHAPE)
    ratios[2, 0, 1] = -2.0
    oracle = oracle_of({(2, 0, 1, token): 1.0 for token in range(16)}, log_ratios=ratios)
    finding = find(oracle)
    assert finding.verdict == "sequence"
    assert {culprit.address[:3] for culprit in finding.culprits} == {(2, 0, 1)}
    assert {culprit.cause for culprit in finding.culprits} == {"sequence_mismatch"}
    assert finding.backward_probes == 1
    assert finding.is_removal_enough


def test_single_culprits_beside_a_bad_sequence_are_named_too(oracle_of) -> None:
    ratios = torch.zeros(SHAPE)
    ratios[2, 0, 1] = -2.0
    ratios[0, 0, 3, 2] = 4.0
    tokens = {(2, 0, 1, token): 2.0 for token in range(16)}
    finding = find(oracle_of({**tokens, (0, 0, 3, 2): 5.0}, log_ratios=ratios))
    assert finding.verdict == "sequence"
    assert len(finding.culprits) == 8
    assert finding.culprits[-1].address == (0, 0, 3, 2)
    assert finding.culprits[-1].cause == "token_mismatch"
    assert finding.is_removal_enough


def test_a_sequence_of_two_tokens_is_not_off_as_a_whole(oracle_of) -> None:
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[1, 0, 1, 2:] = False
    places = [(1, 0, 1, 0), (1, 0, 1, 1)]
    finding = find(oracle_of(dict.fromkeys(places, 5.0), mask=mask, log_ratios=ratios_at(*places)))
    assert finding.verdict == "tokens"
    assert named(finding) == set(places)


def test_one_bad_token_does_not_make_its_sequence_look_off(oracle_of) -> None:
    finding = find(oracle_of({(2, 0, 1, 3): 9.0}, log_ratios=ratios_at((2, 0, 1, 3), log_ratio=8.0)))
    assert finding.verdict == "tokens"


def exploded_layer(oracle, factor: float = 100.0):
    gradients = oracle.gradients.clone()
    gradients[..., 16:32] *= factor
    return type(oracle)(gradients)


def test_a_layer_that_explodes_on_every_token_is_the_verdict(oracle_of) -> None:
    finding = find(exploded_layer(oracle_of()))
    assert finding.verdict == "layer"
    assert finding.layers[0][0] == "layers.1"
    assert finding.layers[0][1] > 0.9


def test_a_token_whose_ratio_is_fine_and_whose_gradient_sits_in_one_layer_blames_the_layer(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 0, 2): 1.0})
    gradients = oracle.gradients.clone()
    gradients[1, 0, 0, 2, 16:32] *= 50
    finding = find(type(oracle)(gradients))
    assert finding.verdict == "layer"
    assert [culprit.cause for culprit in finding.culprits] == ["layer"]


def test_when_the_probe_fails_its_check_head_norms_and_masked_backwards_name_the_token(oracle_of) -> None:
    place = (1, 0, 2, 7)
    finding = find(oracle_of({place: 10.0}, noise=0.3, is_base_reusable=False), search="directional")
    assert abs(finding.completeness - 1) > 0.05
    assert finding.tier == 2
    assert named(finding) == {place}
    assert "not trusted" in finding.notes[0]
    assert finding.culprits[0].share == pytest.approx(1, abs=2e-3)


def test_without_head_norms_a_failed_check_ends_in_the_reference_search(oracle_of) -> None:
    place = (1, 0, 2, 7)
    finding = find(oracle_of({place: 10.0}, noise=0.3, is_base_reusable=False, has_head_norms=False))
    assert finding.tier == 3
    assert named(finding) == {place}
    assert finding.culprits[0].grad_norm == pytest.approx(10.0, rel=1e-4)
    assert finding.is_removal_enough


def test_directional_search_never_bisects(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 2, 7): 10.0}, noise=0.3, is_base_reusable=False, has_head_norms=False)
    finding = find(oracle, search="directional")
    assert finding.tier == 2
    assert finding.culprits == ()


def test_the_reference_search_alone_answers_without_shares(oracle_of) -> None:
    finding = find(oracle_of({(1, 0, 2, 7): 10.0}), search="bisect")
    assert finding.tier == 3
    assert finding.completeness is None
    assert named(finding) == {(1, 0, 2, 7)}
    assert finding.is_removal_enough


def test_an_exhausted_budget_is_said_in_words(oracle_of) -> None:
    finding = find(oracle_of({(1, 0, 2, 7): 10.0}), search="bisect", probe_budget=5)
    assert finding.is_budget_exhausted
    assert finding.culprits == ()
    assert "budget" in finding.notes[0]


def test_opposite_neighbours_that_cancel_leave_no_spike_and_nobody_named_by_the_search(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 1, 6): 10.0}, size=0.02)
    gradients = oracle.gradients.clone()
    gradients[1, 0, 1, 7] = -gradients[1, 0, 1, 6]
    oracle = type(oracle)(gradients)
    assert oracle.grad_norm < THRESHOLD
    assert find(oracle, search="bisect").culprits == ()


def test_what_remains_is_the_gradient_without_the_culprits(oracle_of) -> None:
    culprits = {(0, 0, 0, 0): 30.0, (1, 0, 1, 5): 3.0}
    oracle = oracle_of(culprits)
    finding = find(oracle)
    clean = oracle.gradients.clone()
    for address in culprits:
        clean[address] = 0
    torch.testing.assert_close(oracle.remaining, clean.flatten(0, 3).sum(0), atol=1e-5, rtol=0)
    assert finding.remaining_norm == pytest.approx(float(oracle.remaining.norm()))


@pytest.mark.parametrize("place", ["reward", "behavior_logprob", "ratio", "loss"])
def test_a_flag_of_the_forward_names_the_token_of_a_non_finite_gradient_at_once(oracle_of, place: str) -> None:
    flags = torch.zeros(SHAPE, dtype=torch.bool)
    flags[2, 0, 1, 4] = True
    oracle = oracle_of(nonfinite={place: flags})
    oracle.whole[:] = math.nan
    finding = find(oracle)
    assert finding.verdict == "numeric"
    assert finding.tier == 0
    assert named(finding) == {(2, 0, 1, 4)}
    assert finding.culprits[0].cause == f"non-finite: {place}"
    assert finding.is_removal_enough


def test_a_non_finite_hidden_state_is_followed_to_its_layer_and_to_the_token_that_brought_it_in(oracle_of) -> None:
    flags = torch.zeros(SHAPE, dtype=torch.bool)
    flags[2, 0, 1, :] = True  # a masked score of NaN is still NaN, so earlier tokens are spoiled too
    oracle = oracle_of(nonfinite={"hidden_state": flags, "logprob": flags})
    oracle.whole[:] = math.nan
    finding = find(oracle)
    assert named(finding) == {(2, 0, 1, 4)}
    assert finding.culprits[0].cause == "non-finite: hidden_state of layers.1"


def test_a_gradient_that_is_non_finite_only_in_the_backward_is_bisected(oracle_of) -> None:
    oracle = oracle_of()
    oracle.gradients[3, 0, 2, 1, 0] = math.inf
    finding = find(type(oracle)(oracle.gradients))
    assert finding.tier == 3
    assert named(finding) == {(3, 0, 2, 1)}
    assert finding.culprits[0].cause == "non-finite: backward"
    assert finding.is_removal_enough


def test_a_non_finite_value_from_outside_the_loss_names_the_parameters_and_no_token(oracle_of) -> None:
    outside = torch.zeros(64)
    outside[20] = math.nan
    finding = find(oracle_of(outside=outside))
    assert finding.verdict == "numeric"
    assert finding.culprits == ()
    assert "layers.1" in finding.notes[0]
    assert math.isfinite(finding.remaining_norm)


def test_weights_that_are_non_finite_themselves_are_named_instead_of_every_token(oracle_of) -> None:
    oracle = oracle_of(nonfinite={"hidden_state": torch.ones(SHAPE, dtype=torch.bool)})
    oracle.whole[:] = math.nan
    oracle.spoiled_parameters = ("layers.1.weight",)
    finding = find(oracle)
    assert finding.verdict == "numeric"
    assert finding.culprits == ()
    assert "layers.1.weight" in finding.notes[0]
    assert not finding.is_removal_enough


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("search", "bisec"),
        ("top_k", 0),
        ("top_k", True),
        ("probe_budget", 1.5),
        ("completeness_tolerance", math.nan),
        ("culprit_frac", 0),
        ("culprit_frac", "0.25"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        LadderSettings(**{field: value})
