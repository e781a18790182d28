"""Without a GPU these tests run in Triton's interpreter."""

import torch

if not torch.cuda.is_available():
    from tests.support.interpreter import speed_up_interpreter

    speed_up_interpreter()
