"""What md4 tells Python's logging, and that it is silent if nobody listens."""

import logging
import subprocess
import sys

from md4.support.log import log


def test_silent_unless_somebody_listens(capsys):
    assert [type(handler) for handler in log.handlers] == [logging.NullHandler]
    code = "import md4, logging; logging.getLogger('md4').error('unheard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
