"""A figure of a bench: a line on the screen, and a record in the file that $FIGURES names, of which bench_all.py makes its table."""
import json, os

def num(x:float) -> str: return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"

def beside(r:dict) -> str:
  """What a record's figure is held against: a number that was set, or what was measured in the same run, and how much of it."""
  if r["limit"] is None: return ""
  sign, share = next(((sign, r[k]) for k, sign in (("least", "at least "), ("most", "at most ")) if r[k] is not None), ("", 1))
  return sign + (f"{share:g} × " if share != 1 else "") + num(r["limit"]) + (f" ({r['of']})" if r["of"] else "")

def figure(name:str, ours:float, unit:str="", limit:float|None=None, of:str="", *, least:float|None=None, most:float|None=None,
           more:str="") -> bool|None:
  """`limit` is a number that was set, or one measured in the same run, and then `of` says of what: memcpy, a peer. ours / limit is to be
  at least `least` or at most `most`; with neither it is there to be looked at. Returns whether it is met."""
  met = None if limit is None else ours >= least * limit if least is not None else ours <= most * limit if most is not None else None
  r = {"name": name, "ours": float(ours), "unit": unit, "limit": None if limit is None else float(limit), "of": of, "least": least, "most": most,
       "ratio": float(ours / limit) if limit else None, "met": None if met is None else bool(met), "more": more}
  ratio, said = "" if r["ratio"] is None else f"{r['ratio']:.2f}", "" if met is None else ": ok" if met else ": NOT MET"
  print(f"{name:62s} {num(ours):>10s} {unit:10s} {ratio:>6s}  {beside(r)}{said}{'; ' * bool(beside(r) and more)}{more}".rstrip(), flush=True)
  if os.environ.get("FIGURES"):
    with open(os.environ["FIGURES"], "a") as f: f.write(json.dumps(r) + "\n")
  return r["met"]
