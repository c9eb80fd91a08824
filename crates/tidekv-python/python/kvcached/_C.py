"""Another name of :mod:`kvcached.vmm_ops`: ``kvcached._C is kvcached.vmm_ops``."""

import sys

from kvcached import vmm_ops

sys.modules[__name__] = vmm_ops
