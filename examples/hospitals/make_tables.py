"""Make the tables of five hospitals, as unlike as such tables are, in the folder `tables`.

    python make_tables.py

About one patient in ten is ill. Every fifth age or so is missing, each hospital writes the sex of a patient
in its own way, Tromsø has seen nobody who was ill, and Vardø has three patients. `new.csv` has patients of
Oslo whose outcome is not known yet, with the columns in another order.
"""

import csv
from datetime import date, timedelta
from pathlib import Path

import numpy as np

HOSPITALS = {
    "oslo": (300, ("f", "m")),
    "bergen": (200, ("female", "male")),
    "narvik": (120, ("1", "2")),
    "tromso": (60, ("f", "m")),
    "vardo": (3, ("f", "m")),
}
STAGES = ("none", "mild", "severe")


def patients(name, number, codes, random):
    for place in range(number):
        sex, stage = int(random.integers(2)), int(random.choice(3, p=(0.6, 0.3, 0.1)))
        age, pressure = random.normal(60, 14), random.normal(130, 18)
        smokes = random.random() < 0.3
        risk = (age - 60) / 7 + (pressure - 130) / 12 + 2 * stage + smokes - 5
        ill = random.random() < 1 / (1 + np.exp(-risk)) and name != "tromso"
        yield {
            "patient": f"{name}-{place}",
            "sex": codes[sex],
            "age": "" if random.random() < 0.2 else f"{age:.0f}",
            "pressure": f"{pressure:.0f}",
            "stage": STAGES[stage],
            "smoker": "" if random.random() < 0.1 else ("no", "yes")[int(smokes)],
            "admitted": str(date(2025, 1, 1) + timedelta(days=int(random.integers(365)))),
            "outcome": "ill" if ill else "well",
        }


def write(path, rows, columns):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


random = np.random.default_rng(7)
Path("tables").mkdir(exist_ok=True)
for name, (number, codes) in HOSPITALS.items():
    rows = list(patients(name, number, codes, random))
    write(f"tables/{name}.csv", rows, list(rows[0]))
    print(f"tables/{name}.csv: {number} patients, {sum(row['outcome'] == 'ill' for row in rows)} of them ill")
rows = list(patients("oslo", 8, ("f", "m"), random))
write("new.csv", rows, ["admitted", "smoker", "stage", "pressure", "age", "sex", "patient"])
