"""Everyday English for what tools call otherwise: a small table, for words and for verbs of several words.

Each word of a group finds the others. Only words that mean the same to most people, in whatever trade, are in here:
what a particular server calls its things is in its own descriptions.
"""

from functools import cache
from typing import Final

from belljar.toolbox.stems import stem

# Verbs of more than one word, and questions, with a word that says the same.
PHRASES: Final = (
    ("look up", "search"),
    ("look for", "search"),
    ("search for", "search"),
    ("find out", "search"),
    ("get rid of", "delete"),
    ("throw away", "delete"),
    ("throw out", "delete"),
    ("take away", "remove"),
    ("take off", "remove"),
    ("kick off", "start"),
    ("clean up", "cleanup"),
    ("write down", "create note"),
    ("note down", "create note"),
    ("jot down", "create note"),
    ("set up", "create"),
    ("shut down", "stop"),
    ("turn off", "disable"),
    ("turn on", "enable"),
    ("switch to", "select"),
    ("sign up", "register"),
    ("sign in", "login"),
    ("log in", "login"),
    ("fill in", "fill"),
    ("fill out", "fill"),
    ("go to", "navigate"),
    ("go back", "navigate back"),
    ("how many", "count"),
    ("how much", "amount"),
    ("how big", "size"),
    ("how large", "size"),
    ("how long", "duration"),
    ("how far", "distance"),
    ("how fast", "performance"),
    ("how slow", "performance"),
    ("right now", "current"),
    ("at the moment", "current"),
    ("tick off", "complete"),
    ("check off", "complete"),
    ("add up", "sum"),
    ("to do", "task"),
    ("to-do", "task"),
    ("web page", "webpage page"),
    ("web site", "website"),
)
GROUPS: Final = (
    # verbs
    "remove delete drop erase forget discard clear destroy unset",
    "make create add new insert write generate open start build register",
    "find search query lookup locate discover filter",
    "read get view open load cat fetch retrieve see show inspect",
    "write save store put set update",
    "run execute call invoke exec evaluate",
    "fetch download retrieve scrape get",
    "list enumerate ls all which",
    "move rename transfer",
    "copy duplicate clone fork",
    "change modify edit update alter adjust patch",
    "replace substitute swap exchange edit",
    "undo revert reset restore unstage rollback",
    "send post publish submit tell notify say deliver",
    "reply answer respond",
    "stop end cancel abort kill close quit",
    "start begin launch run",
    "restart reload rollout reboot",
    "press click tap push",
    "type enter fill input",
    "choose select pick switch",
    "finish complete done resolve",
    "upload attach attachment",
    "convert export transform save",
    "check validate verify test status health",
    "explain analyze analyse describe why diagnose",
    "watch monitor observe follow track",
    "invite join add",
    "assign give allocate",
    "accept merge approve",
    "propose suggest recommend advise recommendation",
    "mute silence snooze",
    "lock protect secure encrypt",
    "compare diff difference versus",
    "summarize summary overview brief short outline",
    "count number total amount size many length",
    "calculate compute sum formula aggregate",
    "draw plot chart graph diagram",
    "format style bold color colour font",
    "record capture screencast",
    "remember memory knowledge store set note",
    "think reason",
    "translate language",
    "resize scale smaller larger bigger replica",
    "plan schedule appointment event calendar",
    "remind reminder task todo",
    "buy purchase order",
    "pay payment charge invoice",
    # nouns
    "history log",
    "recent latest last newest log",
    "current now today",
    "change modification edit diff",
    "uncommitted unstaged pending",
    "folder directory dir",
    "file document",
    "web url http internet website page site webpage online link",
    "tree structure hierarchy recursive",
    "several multiple many batch bulk",
    "message mail email letter",
    "conversation thread chat discussion",
    "comment remark note say",
    "picture image photo screenshot snapshot",
    "screen screenshot display window viewport page",
    "video screencast recording movie",
    "table sql database db",
    "row record entry line",
    "column field property attribute",
    "spreadsheet sheet worksheet workbook excel",
    "slide presentation powerpoint deck",
    "time clock date timezone hour",
    "expire ttl timeout hour",
    "repo repository",
    "ticket issue bug problem error crash exception fault",
    "task todo item",
    "person people user member colleague someone somebody author who team",
    "customer client contact company",
    "owner holder own",
    "group team organization channel",
    "place location address position where",
    "map geographic geocode",
    "route direction way travel drive distance",
    "tab page window",
    "button element control",
    "form field input",
    "title heading header headline",
    "news headline article",
    "article paper publication study",
    "price cost value quote",
    "share stock equity",
    "earn income revenue profit financial earning",
    "forecast prediction weather",
    "alarm alert notification warning",
    "password credential secret",
    "setting configuration config option preference",
    "output log print console",
    "container pod docker",
    "variable env environment",
    "word text string content",
    "release version deploy ship",
    "space size storage disk",
    "speed performance fast slow",
    "label tag category",
    "key name id",
    "data information detail info",
    "schema structure field column",
    "index indexes",
    "script javascript js code program",
    "code source function",
    "subscriber subscription channel",
    "phone call telephone engagement",
)
# Whoever says the first may mean the second, and not the other way round.
ALSO: Final = (("change", "commit"), ("scientific", "paper"), ("everywhere", "all"), ("propose", "pull"))


@cache
def synonyms() -> dict[str, frozenset[str]]:
    """The stems that a stem may stand for."""
    found: dict[str, set[str]] = {}
    for group in GROUPS:
        stems = {stem(word) for word in group.split()}
        for one in stems:
            found.setdefault(one, set()).update(stems - {one})
    for said, meant in ALSO:
        found.setdefault(stem(said), set()).add(stem(meant))
    return {one: frozenset(others) for one, others in found.items()}


def rephrased(query: str) -> str:
    """A query in lower case, with single words for verbs of several."""
    text = f" {query} "
    for said, meant in PHRASES:
        text = text.replace(f" {said} ", f" {meant} ")
    return text
