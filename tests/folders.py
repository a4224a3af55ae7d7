"""To import this lets a test use what another one defines, in whichever folder below tests/ that one lies."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += sorted({str(path.parent) for path in HERE.rglob("test_*.py")} - set(sys.path))
