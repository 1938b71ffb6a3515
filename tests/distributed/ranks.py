"""Run by torchrun: every case, on so many processes."""

import os
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    import attention_cases
    import loss_cases
    import memory_cases

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for cases in (attention_cases, loss_cases, memory_cases):
        cases.main()
    dist.barrier()
    sys.stdout.write("all cases hold\n")
    sys.stdout.flush()
    os._exit(0)  # at the end of Python, threads of torch's process group now and then abort
