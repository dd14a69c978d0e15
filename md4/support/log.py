"""md4's messages to Python's `logging`, under the name "md4".

INFO is what happens once for a calculation: the backend, kernels that are compiled, lists that are made. DEBUG is what
happens in between: each kernel, and memory that is given up. A program sees them after
`logging.basicConfig(level=logging.INFO)`.
"""

import logging

log = logging.getLogger("md4")
# A library is silent unless the program that uses it asks for its messages.
log.addHandler(logging.NullHandler())
