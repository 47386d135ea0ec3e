# SPDX-License-Identifier: Apache-2.0
"""What scripts/prepare_data.py is made of: documents, chat templates, tokens, files."""
import importlib


class Problem(Exception):
    """Something the user can put right."""


class MissingPackage(Problem):
    """A Python package that is needed and not here."""


def load_package(name, purpose):
    """Imports a package that only some runs need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingPackage(
            f"{purpose} needs the Python package {name}. Run scripts/setup.sh once: it installs it into .venv, where "
            "this script finds it (for this script alone: python3 -m venv .venv && "
            ".venv/bin/pip install tokenizers jinja2)") from None
