"""Your own data and your own network: three hospitals whose instruments are set differently.

    python examples/own_data_and_model.py

Data are arrays by client, the network is any `nn.Module`. A fifth of every client's samples is kept for
testing. FedPer shares the body and leaves each hospital its own head.
"""

import numpy as np
import torch
from torch import nn

import sartor

generator = np.random.default_rng(0)
data = {}
for hospital, offset in {"north": 0.0, "east": 1.0, "south": -1.0}.items():
    labels = generator.integers(0, 3, 200)
    samples = generator.normal(offset + 2 * labels[:, None], 1.0, (200, 12))
    data[hospital] = (samples.astype(np.float32), labels)

torch.manual_seed(0)  # the same network every time
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
result = sartor.run(
    "fedper", data=data, model=model, head="2", rounds=20, local={"batch": 20}, hyper={"lr": 0.1}
)
print("accuracy of every hospital's own model:", result.clients["personal_local_accuracy"][-3:])

model.load_state_dict(result.state_dict(client=0))  # north's model, back in your module
torch.save(model.state_dict(), "north.pt")
