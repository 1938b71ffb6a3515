"""Run by torchrun: every case, on so many processes."""

import os
import sys

import torch
import torch.distributed as dist

from distributed import attention_cases

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    attention_cases.main()
    dist.barrier()
    sys.stdout.write("all cases hold\n")
    sys.stdout.flush()
    os._exit(0)  # at the end of Python, threads of torch's process group now and then abort
