#!/usr/bin/env python3
"""Compares network plugins of NCCL in the same two processes, in turns: two ranks on one GPU.

compare.py starts new processes for each network, and their times differ more than the networks do: by where the threads run. Here each
plugin has communicators of its own in the same processes, the plugins take turns within milliseconds, and the communicators are made
anew several times.

    gcc -O2 -shared -fPIC -o libnccl-net-in_turns.so in_turns.c -ldl
    nvidia-cuda-mps-control -d
    in_turns.py --library libnccl-net-in_turns.so [--seconds 60] [--calls] NAME=PATH[@SPEED]...

The last plugin is the one that the others are compared with. SPEED (Mbit/s) is told to NCCL instead of the plugin's own; NCCL chooses its
protocol by it. `--calls` shows what NCCL calls, and how long each call takes.
"""
import argparse, ctypes, json, os, statistics, time

SINGLE = [4, 4 << 10, 32 << 10, 128 << 10, 256 << 10]
SIZES = [4, 1 << 10, 4 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def worker(rank, port, options, names):
    import torch, torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_HOSTID=f"host{rank}", GLOO_SOCKET_IFNAME="lo")
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    library = ctypes.CDLL(options.library)
    library.in_turns_report.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_char_p, ctypes.c_int]
    buffers = {size: torch.zeros(size // 4, device="cuda") for size in set(SINGLE + SIZES)}

    def make(which):
        """A communicator over a plugin, with all its connections made."""
        library.in_turns_select(which)
        group = dist.new_group([0, 1], backend="nccl")
        for size in sorted(buffers):
            x = torch.full((size // 4,), float(rank + 1), device="cuda")
            dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            assert torch.all(x == 3), size
        for size in SINGLE:
            single(group, size, 20)
        return group

    def single(group, size, calls=60):
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            dist.all_reduce(buffers[size], group=group)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    def many(group, size, calls=None):
        calls = calls or (60 if size <= 512 << 10 else 20 if size <= 4 << 20 else 6)
        dist.all_reduce(buffers[size], group=group)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(buffers[size], group=group)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls * 1e6

    # NCCL forgets a plugin when its last communicator is destroyed.
    library.in_turns_select(len(names) - 1)
    keeper = dist.new_group([0, 1], backend="nccl")
    dist.all_reduce(buffers[4], group=keeper)
    torch.cuda.synchronize()
    results = {f"one {size}": [] for size in SINGLE} | {str(size): [] for size in SIZES}
    start, generation = time.time(), 0
    while True:
        order = [(at + generation) % len(names) for at in range(len(names))]
        groups = {which: make(which) for which in order}
        for key in results if options.calls and generation == 0 else []:
            for which in order:
                dist.barrier()
                library.in_turns_time(1)
                (single if key.startswith("one") else many)(groups[which], int(key.split()[-1]), 50)
                library.in_turns_time(0)
                text = ctypes.create_string_buffer(2000)
                library.in_turns_report(which, 50.0, text, 2000)
                if rank == 0:
                    print(f"{key} {names[which]}:{text.value.decode()}", flush=True)
        for turn in range(4):
            for key, rows in results.items():
                row = {}
                for at in range(len(names)):
                    which = order[(at + turn) % len(names)]
                    measure = single if key.startswith("one") else many
                    row[names[which]] = measure(groups[which], int(key.split()[-1]))
                rows.append(row)
        for which in order:
            dist.destroy_process_group(groups[which])
        generation += 1
        go_on = torch.tensor([float(time.time() - start < options.seconds)])
        dist.all_reduce(go_on)
        if go_on.item() < 2:
            break
    dist.destroy_process_group(keeper)
    if rank == 0:
        print_table(results, names, generation)
    dist.barrier()
    dist.destroy_process_group()


def print_table(results, names, generation):
    base = names[-1]
    print(f"{generation} times new communicators, {len(results['4'])} rounds. Median in us; median of the ratios to {base} (quartiles)")
    for key, rows in results.items():
        line = f"| {key} |"
        for name in names:
            ratios = sorted(row[name] / row[base] for row in rows)
            low, middle, high = (ratios[len(ratios) * quarter // 4] for quarter in (1, 2, 3))
            line += f" {statistics.median(row[name] for row in rows):.1f}, {middle:.3f} ({low:.2f} to {high:.2f}) |"
        print(line)
    print(json.dumps(results))


if __name__ == "__main__":
    import torch.multiprocessing as mp
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("plugins", nargs="+")
    options = parser.parse_args()
    options.library = os.path.abspath(options.library)
    named = [plugin.split("=", 1) for plugin in options.plugins]
    os.environ.update(IN_TURNS=",".join(os.path.abspath(path) for _, path in named), NCCL_NET_PLUGIN=options.library,
                      NCCL_NET="InTurns", PYTHONUNBUFFERED="1")
    mp.spawn(worker, args=(29500 + os.getpid() % 400, options, [name for name, _ in named]), nprocs=2)
