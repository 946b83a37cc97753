#!/usr/bin/env python3
"""Runs real NCCL over the plugin and over other networks: two ranks on one GPU.

NCCL takes the two ranks for two hosts (NCCL_HOSTID) and goes through its network. Needs PyTorch with NCCL and one NVIDIA GPU.
Start MPS first (nvidia-cuda-mps-control -d), or the ranks spend their time taking turns on the GPU.

    compare.py --plugin libnccl-net-crosstie.so [--other NAME=PATH] [--rounds 3] [--parts bench,collectives,failover,train]

`--other` names a further plugin to compare with, by NCCL's name for it. Every part asserts that NCCL's log says which network it
uses. The results are printed as tables, and as JSON on the last line.
"""
import argparse, json, os, re, signal, statistics, subprocess, sys, tempfile, time

# Sizes at which a single call is timed, too.
SHORT = [4, 4 << 10, 32 << 10]
# Faults of a link, as `docs/guide/nccl.md` describes them: one in so many requests. All bytes must arrive nevertheless.
FAULTS = "lose=2000/fail=2000/down=10000/stall=10000/refuse=500/hold=500"
# Seconds that one part may take.
TIMEOUT = 120
SIZES = [4, 1 << 10, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def setup(rank, port):
    import torch, torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_HOSTID=f"host{rank}")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda:0"))
    return torch, dist


def finish(torch, dist):
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def bench(rank, port, out):
    """Times all_reduce: the median of several batches, each batch without a synchronisation inside. For short messages the program
    that starts the calls is then slower than the network, so single calls that are waited for are timed, too (`one N`)."""
    torch, dist = setup(rank, port)
    times = {}
    for size in SHORT:
        x = torch.zeros(size // 4, device="cuda")
        singles = []
        for _ in range(400):
            start = time.perf_counter()
            dist.all_reduce(x)
            torch.cuda.synchronize()
            singles.append(time.perf_counter() - start)
        times[f"one {size}"] = statistics.median(singles[50:]) * 1e6
    for size in SIZES:
        x = torch.full((size // 4,), float(rank + 1), device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        assert torch.all(x == 3), size
        calls = 200 if size <= 256 << 10 else 40 if size <= 4 << 20 else 10
        for _ in range(5):
            dist.all_reduce(x)
        torch.cuda.synchronize()
        batches = []
        for _ in range(5):
            x.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(x)
            torch.cuda.synchronize()
            batches.append((time.perf_counter() - start) / calls)
        times[size] = statistics.median(batches) * 1e6
    if rank == 0:
        json.dump(times, open(out, "w"))
    finish(torch, dist)


def collectives(rank, port, out):
    """Checks every element of the results of all collectives, for many sizes, also odd ones."""
    torch, dist = setup(rank, port)
    checks = 0
    for n in [1, 2, 3, 31, 1000, 4099, 65_537, 1 << 20, (4 << 20) + 1]:
        base = torch.arange(n, device="cuda", dtype=torch.float32) % 1021
        for kind in (torch.float32, torch.int32):
            mine, other = (base + rank).to(kind), (base + 1 - rank).to(kind)
            x = mine.clone(); dist.all_reduce(x)
            assert torch.equal(x, mine + other), ("all_reduce", n)
            got = [torch.empty_like(mine) for _ in range(2)]; dist.all_gather(got, mine)
            assert torch.equal(got[rank], mine) and torch.equal(got[1 - rank], other), ("all_gather", n)
            parts = torch.stack([mine, mine * 2]); x = torch.empty_like(mine)
            dist.reduce_scatter_tensor(x.unsqueeze(0), parts)
            assert torch.equal(x, (mine + other) * (rank + 1)), ("reduce_scatter", n)
            for root in range(2):
                x = mine.clone(); dist.broadcast(x, root)
                assert torch.equal(x, mine if root == rank else other), ("broadcast", n)
            x = torch.empty_like(mine)
            operations = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, x, 1 - rank)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert torch.equal(x, other), ("send/recv", n)
            x = torch.empty(2 * n, device="cuda", dtype=kind); dist.all_to_all_single(x, torch.cat([mine, mine]))
            assert torch.equal(x, torch.cat([mine, other] if rank == 0 else [other, mine])), ("all_to_all", n)
            checks += 7
    # Communicators are destroyed and created again.
    for _ in range(3):
        group = dist.new_group([0, 1]); x = torch.ones(1000, device="cuda"); dist.all_reduce(x, group=group)
        assert torch.all(x == 2); torch.cuda.synchronize(); dist.destroy_process_group(group); checks += 1
    if rank == 0:
        json.dump(checks, open(out, "w"))
    finish(torch, dist)


def failover(rank, port, out):
    """Sends for some seconds over rails that fail and come back. Checks every result."""
    torch, dist = setup(rank, port)
    start, step, more = time.time(), 0, True
    while more:
        for _ in range(60):
            n = [1000, 1 << 20, 4 << 20][step % 3]
            x = torch.full((n,), float(rank + step % 1000), device="cuda"); dist.all_reduce(x)
            assert torch.all(x == 2 * (step % 1000) + 1), step
            step += 1
        # Both ranks end after the same step.
        x = torch.tensor([float(time.time() - start < 5)], device="cuda"); dist.all_reduce(x)
        more = x.item() == 2
    if rank == 0:
        json.dump(step, open(out, "w"))
    finish(torch, dist)


def train(rank, port, out):
    """DistributedDataParallel on a small network. The losses must not depend on the network."""
    torch, dist = setup(rank, port)
    torch.manual_seed(1); torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
                                torch.nn.Linear(2048, 10)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(30):
        x, y = torch.randn(128, 256, generator=generator).cuda(), torch.randint(10, (128,), generator=generator).cuda()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward(); optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        json.dump(losses, open(out, "w"))
    finish(torch, dist)


PARTS = {"bench": bench, "collectives": collectives, "failover": failover, "train": train}


def start_rank(rank, part, port, out):
    PARTS[part](rank, port, out)


def run(part, network, port, extra={}):
    """Runs a part over a network: (name for the log, environment). Returns its result and NCCL's log."""
    name, variables = network
    with tempfile.TemporaryDirectory() as folder:
        log, out = os.path.join(folder, "log.%p"), os.path.join(folder, "out")
        env = {**os.environ, **variables, **extra, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET",
               "NCCL_DEBUG_FILE": log, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
        ranks = subprocess.Popen([sys.executable, __file__, "--rank-part", part, str(port), out], env=env, start_new_session=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = ranks.communicate(timeout=TIMEOUT)
            status = str(ranks.returncode)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            output, _ = ranks.communicate()
            status = f"did not end within {TIMEOUT} s"
        text = "".join(open(os.path.join(folder, f)).read() for f in sorted(os.listdir(folder)) if f.startswith("log"))
        if status != "0" or f"Using network {name}" not in text:
            sys.exit(f"{part} over {name} failed ({status})\n{output[-3000:]}\n{text[-5000:]}")
        return json.load(open(out)), text


def main():
    if sys.argv[1:2] == ["--rank-part"]:
        import torch.multiprocessing as mp
        part, port, out = sys.argv[2:5]
        mp.spawn(start_rank, args=(part, int(port), out), nprocs=2)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", required=True)
    parser.add_argument("--other", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="collectives,train,failover,bench")
    parser.add_argument("--fault-seeds", default="1,2,3")
    options = parser.parse_args()
    parts = options.parts.split(",")
    port = iter(range(29600, 29999))
    ours = ("Crosstie", {"NCCL_NET_PLUGIN": os.path.abspath(options.plugin), "NCCL_NET": "Crosstie"})
    socket = ("Socket", {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"})
    networks = [ours, socket]
    for other in options.other:
        name, path = other.split("=", 1)
        networks.append((name, {"NCCL_NET_PLUGIN": os.path.abspath(path), "NCCL_NET": name}))
    results = {}
    if "collectives" in parts:
        checks, text = run("collectives", ours, next(port))
        print(f"collectives over {ours[0]}: {checks} checks passed", flush=True)
        print("\n".join(line for line in text.splitlines() if "Crosstie" in line)[:4000], flush=True)
        results["collectives"] = checks
    if "failover" in parts:
        failures = 0
        for seed in options.fault_seeds.split(","):
            rail = f"fault:{seed}/{FAULTS}:software"
            devices = f"{rail}+software"
            steps, text = run("failover", ours, next(port), {"CROSSTIE_NCCL_DEVICES": devices})
            found = re.findall(rf"rail 0 fault:{seed}/\S*: .*? (\d+) replays .*? (\d+) failures, (\d+) returns", text)
            replays, failed, returns = (sum(int(match[i]) for match in found) for i in range(3))
            print(f"failover, seed {seed}: {steps} results right; rail 0 failed {failed} times, came back {returns} times, "
                  f"{replays} parts sent again", flush=True)
            failures += failed
        assert failures > 0, "no rail failed"
        results["failures"] = failures
    if "train" in parts:
        losses = {name: run("train", (name, env), next(port))[0] for name, env in networks}
        same = all(losses[name] == losses[ours[0]] for name in losses)
        print(f"training: {len(losses[ours[0]])} steps, loss {losses[ours[0]][0]:.6f} -> {losses[ours[0]][-1]:.6f}, "
              f"{'the same' if same else 'DIFFERENT'} over {', '.join(losses)}", flush=True)
        results["losses_same"] = same
        results["losses"] = losses[ours[0]]
        assert same, losses
    if "bench" in parts:
        keys = [f"one {size}" for size in SHORT] + [str(size) for size in SIZES]
        times = {name: {key: [] for key in keys} for name, _ in networks}
        for round in range(options.rounds):
            for name, env in networks:
                measured, _ = run("bench", (name, env), next(port))
                for key in keys:
                    times[name][key].append(measured[key])
                print(f"round {round} {name}: " + " ".join(f"{key}:{measured[key]:.1f}us" for key in keys), flush=True)
        print("| bytes | " + " | ".join(times) + " |")
        for key in keys:
            cells, size = [], int(key.split()[-1])
            for name in times:
                us = statistics.median(times[name][key])
                cells.append(f"{us:.1f} us" if size < 1 << 20 else f"{us:.0f} us, {size / us / 1e3:.2f} GB/s")
            print(f"| {key} | " + " | ".join(cells) + " |")
        results["us"] = times
    print(json.dumps(results))


if __name__ == "__main__":
    main()
