# tinygrad's repo has an extra/datasets of its own: with both on sys.path this package is the two merged, ours first.
# The other __init__ imports tinygrad, so it is run only when a name that it defines is asked for.
import os, pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)

def __getattr__(name:str):
  for fn in [os.path.join(p, "__init__.py") for p in __path__[1:] if not name.startswith("__")]:
    if not os.path.isfile(fn): continue
    with open(fn) as f: code = compile(f.read(), fn, "exec")
    if name not in code.co_names: continue
    exec(code, ns:={"__name__":__name__, "__package__":__name__, "__file__":fn, "__path__":__path__})
    globals().update({k:v for k,v in ns.items() if not k.startswith("__")})
    return globals()[name]
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
