from dataclasses import replace

import numpy as np
import pytest

from jaxrl_llm.data.packing import PackSpec, assign, default_row_lengths, pack
from jaxrl_llm.types import UserError
from tests.builders import make_scored


def spec(**changes):
    return PackSpec(
        **{"mini_batches": 2, "sequences": 8, "rows": 2, "row_lengths": (24, 48), "packing": True} | changes
    )


@pytest.mark.parametrize("packing", [True, False])
def test_every_sequence_is_there_once_and_whole(packing):
    scored = make_scored()
    batch = pack(scored, spec(packing=packing))
    for i, s in enumerate(scored):
        at = batch.sequence_ids == i
        a, _, _, _ = np.nonzero(at)
        assert set(a) == {i // 4}, "in its own mini-batch"
        order = np.argsort(batch.positions[at])
        np.testing.assert_array_equal(batch.positions[at][order], np.arange(len(s.rollout.token_ids)))
        np.testing.assert_array_equal(batch.token_ids[at][order], s.rollout.token_ids)
        np.testing.assert_array_equal(batch.action_mask[at][order], s.rollout.action_mask)
        np.testing.assert_array_equal(batch.sampler_logprobs[at][order], s.rollout.logprobs)


@pytest.mark.parametrize("packing", [True, False])
def test_padding_is_no_action_and_belongs_to_no_sequence(packing):
    batch = pack(make_scored(), spec(packing=packing, pad_id=9))
    padding = batch.segment_ids == 0
    assert padding.any()
    assert not batch.action_mask[padding].any()
    assert (batch.sequence_ids[padding] == 8).all()
    assert (batch.token_ids[padding] == 9).all()
    assert (batch.sequence_ids[~padding] < 8).all()


def test_segments_of_a_row_are_different_sequences_next_to_each_other():
    batch = pack(make_scored(), spec())
    rows = batch.segment_ids.reshape(-1, batch.segment_ids.shape[-1])
    ids = batch.sequence_ids.reshape(rows.shape)
    assert rows.max() > 1
    for row, sequence in zip(rows, ids, strict=True):
        used = row[row > 0]
        assert (np.diff(used) >= 0).all()
        assert len(set(used)) == len(set(sequence[row > 0]))


def test_micro_batches_in_use_come_first_and_shapes_depend_on_the_spec_only():
    shapes = set()
    for seed in range(3):
        batch = pack(make_scored(seed=seed), spec())
        shapes.add(tuple(x.shape for x in batch if x is not None))
        for a, used in enumerate(batch.num_micro):
            assert (batch.segment_ids[a, :used] > 0).any(axis=(1, 2)).all()
            assert (batch.segment_ids[a, used:] == 0).all()
    assert len(shapes) == 1


def test_samples_without_reward_are_in_no_row_but_keep_their_place():
    batch = pack(make_scored(failed=(1, 6)), spec())
    assert not (np.isin(batch.sequence_ids, [1, 6])).any()
    np.testing.assert_array_equal(batch.valid, [True, False, True, True, True, True, False, True])
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1, 2, 2, 3, 3])


def test_groups_are_prompt_instances_not_texts():
    scored = make_scored(groups=4)
    same_text = [
        type(s)(
            type(s.rollout)(
                **{
                    **s.rollout.__dict__,
                    "prompt": s.rollout.prompt.__class__(
                        s.rollout.prompt.uid, 0, np.array([1], np.int32), "same", "test"
                    ),
                }
            ),
            s.components,
            s.reward,
        )
        for s in scored
    ]
    np.testing.assert_array_equal(pack(same_text, spec()).group_ids, [0, 0, 1, 1, 2, 2, 3, 3])


def test_rows_take_the_smallest_length_that_holds_the_longest_sequence():
    assert pack(make_scored(longest=10), spec(row_lengths=(8, 16, 48))).token_ids.shape[-1] == 16
    with pytest.raises(UserError, match=r"config\.learner\.row_lengths is 12"):
        pack(make_scored(), spec(row_lengths=(8, 12)))


def test_first_fit_by_falling_length():
    assert assign([5, 3, 4, 2, 2], 8, packing=True) == [[0, 1], [2, 3, 4]]
    assert assign([5, 3], 8, packing=False) == [[0], [1]]
    assert assign([], 8, packing=True) == []


def test_row_lengths_are_a_quarter_a_half_and_all():
    assert default_row_lengths(1024) == (256, 512, 1024)
    assert default_row_lengths(20) == (8, 16, 24)
    assert default_row_lengths(8) == (8,)


def test_a_batch_of_another_size_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="8 sequences, got 6"):
        pack(make_scored(groups=3), spec())


def test_cut_off_responses_are_in_no_row_but_count_in_their_group():
    scored = make_scored()  # all were cut off
    finished = [replace(s, rollout=replace(s.rollout, stop_reason="eos")) if i % 2 else s for i, s in enumerate(scored)]
    batch = pack(finished, spec(mask_truncated=True))
    assert set(batch.sequence_ids[batch.sequence_ids < 8].tolist()) == {1, 3, 5, 7}
    assert batch.valid.all()
    np.testing.assert_array_equal(batch.rewards, [s.reward for s in scored])
    everything = pack(finished, spec())
    assert set(everything.sequence_ids[everything.sequence_ids < 8].tolist()) == set(range(8))


def test_components_stand_in_the_order_asked_for_beside_their_weights():
    scored = [replace(s, components={"b": i, "a": 10.0 * i, "c": 0}) for i, s in enumerate(make_scored(failed=(2,)))]
    batch = pack(scored, spec(components=(("a", 1.0), ("b", 0.5))))
    expected = [[10.0 * i, i] if i != 2 else [0, 0] for i in range(8)]
    np.testing.assert_array_equal(batch.components, np.array(expected, np.float32))
    np.testing.assert_array_equal(batch.component_weights, np.array([1.0, 0.5], np.float32))
    with pytest.raises(UserError, match=r"config.algorithm.components names 'd', .* they returned a, b, c"):
        pack(scored, spec(components=(("d", 1.0),)))


def test_baselines_are_there_if_they_are_asked_for():
    scored = [replace(s, baseline=0.5 * i) for i, s in enumerate(make_scored())]
    np.testing.assert_array_equal(pack(scored, spec(baseline=True)).baseline_rewards, 0.5 * np.arange(8))
    assert pack(scored, spec()).baseline_rewards is None
