"""What each claim says today, and settings by which the long ones are quick."""

_IDS = {
    "holds exactly": "A1 A2 A3 A4 A6 A7 A9 A11 A12 A13 A14 B1 B7 C1 C4 D1 E1 E4 E6",
    "holds with a correction": "A10 E2 E5 E8 G1",
    "holds within a stated scope": "A5 A8 B4 C6 E3",
    "measured: holds": "B2 B3 B5b B6 C2 C3 E9 F4",
    "measured: partly": "E7 F5 F6 F7",
    "refuted": "A15 B5a C5 E10 F1 F2 F3",
}
VERDICTS = {id: verdict for verdict, ids in _IDS.items() for id in ids.split()}
SETTINGS = {
    "B2": {"steps": 200},
    "B4": {"points": 400, "steps": 3},
    "B5a": {"points": 40, "steps": 200},
    "B5b": {"runs": 12},
    "C2": {"units": 200, "most_patterns": 256},
    "C3": {"steps": 800},
    **{id: {"tokens": 256} for id in ("A15", "C5", "E7", "E10", "F1", "F2", "F3", "F6", "F7")},
}
