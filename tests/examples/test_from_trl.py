from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch

from lightning_rlstab import GRPOModule
from lightning_rlstab.module.settings import GRPOSettings


@pytest.mark.slow
def test_trl_and_its_twin_read_the_same_settings_give_the_same_loss_and_both_train(run_example, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of TRL, transformers and Lightning about each other
        from trl import GRPOTrainer

        pairs, modules = [], []
        theirs = GRPOTrainer.compute_loss

        def compared(trainer, model, inputs, *arguments, **keywords):
            """TRL's loss, and the twin's on the very same model and inputs."""
            loss = theirs(trainer, model, inputs, *arguments, **keywords)
            if not modules:
                modules.append(GRPOModule.from_trl(trainer.args, model=model, reward_funcs=trainer.reward_funcs))
            with torch.no_grad():
                ours = modules[0].loss_from_trl_inputs(inputs, accumulation=trainer.args.gradient_accumulation_steps)
            pairs.append((float(loss), float(ours)))
            return loss

        monkeypatch.setattr(GRPOTrainer, "compute_loss", compared)
        trl, twin = run_example("from_trl/trl_script.py"), run_example("from_trl/lightning_twin.py")

    assert len(pairs) == 20  # ten steps of two micro-batches
    assert max(abs(loss) for loss, _ in pairs) > 1e-2
    for loss, ours in pairs:
        assert ours == pytest.approx(loss, rel=1e-5, abs=1e-6)

    config, settings = twin["config"], twin["module"].settings
    assert config is trl["config"]  # one object, from one file
    read = {field.name for field in dataclasses.fields(GRPOSettings)} & set(vars(config))
    for name in sorted(read - {"per_device_eval_batch_size", "lr_scheduler_type"}):
        assert getattr(settings, name) == getattr(config, name), name
    assert settings.lr_scheduler_type == config.lr_scheduler_type.value
    assert {"beta", "num_iterations", "epsilon_high", "reward_weights", "max_grad_norm"} <= read
    assert twin["module"].rollout_plan.num_iterations == trl["trainer"].num_iterations == 2
    assert twin["module"].rewards.names == tuple(each.__name__ for each in trl["trainer"].reward_funcs)

    assert trl["trainer"].state.global_step == twin["trainer"].global_step == config.max_steps
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(twin["model"]).state_dict()
    for end in ("runs/from_trl/trl/policy", "runs/from_trl/lightning/policy"):
        moved = AutoModelForCausalLM.from_pretrained(Path(end)).state_dict()
        assert moved.keys() == start.keys()
        assert any(not torch.equal(moved[name], weight) for name, weight in start.items())
