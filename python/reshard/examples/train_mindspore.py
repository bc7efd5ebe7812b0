"""A small network that `Model.train` of MindSpore trains, which can be killed and started again.

    python -m reshard.examples.train_mindspore --out run

Started again, it resumes from the newest undamaged iteration.
"""

import argparse

import mindspore
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model, RunContext

from reshard.mindspore import ReshardCallback


class Log(Callback):  # type: ignore[misc]
    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        print(params.cur_step_num, float(params.net_outputs.asnumpy()).hex(), flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    mindspore.set_seed(1)  # of the parameters and of the order of the samples
    x = np.random.default_rng(0).standard_normal((96, 16), np.float32)
    dataset = ds.NumpySlicesDataset((x, x.sum(1, keepdims=True)), ["x", "y"], shuffle=True).batch(8)
    network = nn.SequentialCell(nn.Dense(16, 64), nn.ReLU(), nn.Dense(64, 1))
    rate = nn.ExponentialDecayLR(0.01, 0.9, decay_steps=10)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), rate)
    model = Model(network, nn.MSELoss(), optimizer)
    saving = ReshardCallback(args.out, save_every=5, keep=3)
    start = saving.resume(model, dataset)
    if start.initial_epoch < args.epochs:
        model.train(args.epochs, dataset, callbacks=[Log(), saving], initial_epoch=start.initial_epoch)


if __name__ == "__main__":
    main()
