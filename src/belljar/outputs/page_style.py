"""The colours and the styles of code and terminal text, shared by exported pages and the console."""

TOKENS = """
:root { color-scheme: light dark;
  --ink: light-dark(#1c2330, #e4e7ec); --paper: light-dark(#ffffff, #15181e); --soft: light-dark(#f5f6f8, #1e232b);
  --line: light-dark(#dfe3e8, #343b46); --dim: light-dark(#5b6475, #98a2b3); --red: light-dark(#b42318, #f97066);
  --green: light-dark(#1d6339, #7fc797); --amber: light-dark(#8a5200, #e0a960); --accent: light-dark(#175cd3, #84b5ff);
  --keyword: light-dark(#7a3e9d, #c9a0e4); --string: light-dark(#1d6339, #7fc797);
  --number: light-dark(#8a5200, #e0a960); --name: light-dark(#175cd3, #84b5ff); --cyan: light-dark(#0b6478, #67c7d9); }
"""

CODE = """
pre, code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; unicode-bidi: isolate; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.k, .kn, .kc, .ow, .kd { color: var(--keyword); } .s, .s1, .s2, .sd, .sa, .se, .si { color: var(--string); }
.m, .mi, .mf, .mh { color: var(--number); } .nf, .nc, .nb, .nd { color: var(--name); }
.c, .c1, .ch { color: var(--dim); font-style: italic; }
.ansi-bold { font-weight: bold; } .ansi-italic { font-style: italic; } .ansi-underline { text-decoration: underline; }
.ansi-red { color: var(--red); } .ansi-green { color: var(--string); } .ansi-yellow { color: var(--number); }
.ansi-blue { color: var(--name); } .ansi-magenta { color: var(--keyword); } .ansi-cyan { color: var(--cyan); }
.ansi-black, .ansi-white { color: var(--dim); }
"""
