"""What rules are told, read from the file that the Snakefile wrote; imports nothing heavy, since every rule does it."""

import json


def read(path: str, *names: str) -> list[dict]:
    """The entries of some names, in their order. Raises UserError when the file or a name is missing."""
    from stages.errors import UserError

    found = {}
    try:
        with open(path) as file:
            for line in file:
                name, _, entry = line.partition("\t")
                if name in names:
                    found[name] = json.loads(entry)
        return [found[name] for name in names]
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run snakemake, which writes it") from None
    except KeyError as name:
        raise UserError(f"{path}: nothing is planned under {name}; run snakemake, which plans") from None
