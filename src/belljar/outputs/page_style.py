"""How an exported page looks, on paper and in the dark too."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #fff; --soft: #f5f6f8; --line: #dfe3e8; --dim: #667085;
  --red: #b42318; --keyword: #7a3e9d; --string: #22713f; --number: #9a5b00; --name: #175cd3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --paper: #15181e; --soft: #1e232b; --line: #343b46;
  --dim: #98a2b3; --red: #f97066; --keyword: #c9a0e4; --string: #7fc797; --number: #e0a960; --name: #84b5ff; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
header { border-bottom: 1px solid var(--line); margin-bottom: 1.5rem; }
h1 { font-size: 1.3rem; margin: 0; }
header p, .note { color: var(--dim); margin: .25rem 0 1rem; font-size: .85rem; }
pre, code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; unicode-bidi: isolate; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.cell { margin-bottom: 1.75rem; break-inside: avoid-page; }
.prompt { color: var(--dim); font: 12px ui-monospace, monospace; margin-bottom: .25rem; white-space: pre; }
.badge { border: 1px solid var(--red); color: var(--red); border-radius: .6rem; padding: 0 .5rem; margin-left: .6rem; }
.code { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem; }
.output { padding: .5rem .8rem 0; max-height: 40rem; overflow: auto; }
.stderr { color: var(--dim); border-left: 3px solid var(--line); margin-top: .5rem; padding-top: 0; }
.error { color: var(--red); border-left: 3px solid var(--red); margin-top: .5rem; padding-top: 0; }
.undone .code, .undone .output { opacity: .55; }
.rich img { max-width: 100%; background: #fff; }
iframe { width: 100%; border: 1px solid var(--line); border-radius: .4rem; background: #fff; color-scheme: light;
  resize: vertical; }
.k, .kn, .kc, .ow, .kd { color: var(--keyword); } .s, .s1, .s2, .sd, .sa, .se, .si { color: var(--string); }
.m, .mi, .mf, .mh { color: var(--number); } .nf, .nc, .nb, .nd { color: var(--name); }
.c, .c1, .ch { color: var(--dim); font-style: italic; }
.ansi-bold { font-weight: bold; } .ansi-italic { font-style: italic; } .ansi-underline { text-decoration: underline; }
.ansi-red { color: var(--red); } .ansi-green { color: var(--string); } .ansi-yellow { color: var(--number); }
.ansi-blue { color: var(--name); } .ansi-magenta { color: var(--keyword); } .ansi-cyan { color: #0e7490; }
.ansi-black, .ansi-white { color: var(--dim); }
@media print { .output { max-height: none; } }
"""
