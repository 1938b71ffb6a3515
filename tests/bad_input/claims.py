"""Bad input to claims."""

from exptilt import claims

ROWS = [
    (lambda: claims.find("A16"), "A16", r"no claim \'A16\' \(did you mean A"),
    (
        lambda: claims.find("A1").run({"dimension": 3}),
        "dimension",
        r"no setting \'dimension\' \(did you mean dimensions\?\)",
    ),
    (lambda: claims.find("A1").run({"dimensions": 65}), "dimensions", "from 1 to 64"),
    (lambda: claims.find("A1").run({"dimensions": "2.5"}), "dimensions", "Pass a whole number"),
    (lambda: list(claims.run(["A1", "A2"], settings={"wings": 3})), "wings", "no setting 'wings'"),
]
