"""Write the JSON Schemas of the request and the report beside this file; with ``--check`` only compare."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode

from probe_service.schemas import ProbeReport, ProbeRequest

DOCS = Path(__file__).parent


def render(model: type[BaseModel], mode: JsonSchemaMode) -> str:
    """One model's JSON Schema as the text of its file."""
    schema = model.model_json_schema(mode=mode)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write both files, or exit 1 naming those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a file is stale")
    check = parser.parse_args().check
    # A request is what a client may send; a report is what a client will get.
    texts = {
        DOCS / "request.schema.json": render(ProbeRequest, "validation"),
        DOCS / "report.schema.json": render(ProbeReport, "serialization"),
    }
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    if check and stale:
        sys.exit(f"stale: {', '.join(path.name for path in stale)}; run `make schema`")
    for path in stale:
        path.write_text(texts[path], "utf-8")


if __name__ == "__main__":
    main()
