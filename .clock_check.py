"""Before/after of branch clock on one GPU, in under a minute: python clock_check.py"""
import statistics, time, torch
from twell_lab.bench import inference, rows
from twell_lab.cuda import batch
from twell_lab.layers import compiled
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import dispatch, measure

print(torch.cuda.get_device_name(), torch.__version__)

def bursts(calls, count=10, rounds=9):
    """Median us a call: host, wall."""
    found = measure.time_bursts(calls, torch.cuda.synchronize, rounds=rounds, count=count)
    return {n: tuple(round(1e3 * statistics.median(each), 1) for each in pair) for n, pair in found.items()}

@torch.no_grad()
def compiled_calls(tokens):
    layer, inputs, _ = inference.drawn(tokens, 2048, 5632, 29)
    calls = {"dense eager": layer, "dense compiled": torch.compile(layer, dynamic=False)}
    for way in (compiled.ONE, compiled.TORCH):
        torch._dynamo.reset()
        sparse = SparseFFN.from_module(layer)
        compiled.follow(sparse, [(1, way)])
        calls[f"ours compiled, {way}"] = torch.compile(sparse, fullgraph=True, dynamic=False)
        calls.setdefault("ours eager", SparseFFN.from_module(layer))
    for name, call in calls.items():
        print(tokens, name, "error/allowed", round(rows.check(layer, call, inputs), 3))
    print(tokens, "host, wall us:", bursts({n: rows.over(c, inputs) for n, c in calls.items()}))

@torch.no_grad()
def eager_before_after(tokens, choice):
    """`Call.again` as it was: a view, and `run`."""
    layer, inputs, _ = inference.drawn(tokens, 2048, 5632, 29)
    sparse = SparseFFN.from_module(layer, plan=choice)
    for shape in ((tokens, 2048), (1, tokens, 2048)):
        seen = [x.view(shape) for x in inputs]
        y = sparse(seen[0]); assert torch.equal(y, sparse(seen[0])) and torch.equal(y.view(-1, 2048), sparse(inputs[0]))
        calls = {"dense": rows.over(layer, seen), "after": rows.over(sparse, seen)}
        kept = [(c, c.again) for c in (dispatch._Portable, dispatch._Hopper)]
        def before(turn, f=calls["after"]):
            for c, _ in kept: c.again = dispatch.Call.again
            try: return f(turn)
            finally:
                for c, again in kept: c.again = again
        print(tokens, choice, list(shape), bursts({**calls, "before (but for the tape)": before}))
    batch._LEAST = 6  # one CUDA graph for six launches: worth it at 16,384 tokens?
    other = SparseFFN.from_module(layer, plan=choice); dispatch.calls.clear()
    print(tokens, choice, "graphs from 6 launches on", bursts({"x": rows.over(other, inputs)}), measure.quartiles(measure.time_cuda({"x": rows.over(other, inputs)})["x"]))
    batch._LEAST = 8; dispatch.calls.clear()

for n in (16, 256): compiled_calls(n)
for n, c in ((128, Choice("twell")), (256, Choice("twell")), (2048, Choice("hot_cold", 512)), (16384, Choice("hot_cold", 512))): eager_before_after(n, c)
layer, _, seen = inference.drawn(4096, 2048, 5632, 29)
inference.rates_here()
first = measure.time_cuda
for name, clock in (("again", first), ("before", lambda c, r=30, **how: first(c, r, warm=how.get("warm", 3))), ("after", first)):
    measure.time_cuda, start = clock, time.perf_counter()
    for tokens in (1, 16, 256, 2048): inference.planner.plan(inference.profile(layer, seen[:1]), layer, tokens=(tokens,), batches=seen[1:], rates=inference.rates_here())
    print("four plans of one layer,", name, round(time.perf_counter() - start, 2), "s")
