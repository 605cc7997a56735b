"""English word knowledge for the search: synonyms, phrases, irregular forms, actions, and a small stemmer.

Each word of a group finds the others. The tables hold only words that mean the same to most people, in any trade; what
a particular server calls its things is in its own descriptions.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Final

# Verbs of more than one word, and questions, with words that mean the same.
PHRASES: Final = (
    ("who", "person"),
    ("whom", "person"),
    ("whose", "owner"),
    ("how high", "elevation height"),
    ("how tall", "elevation height"),
    ("how old", "age date"),
    ("how often", "count frequency"),
    ("how loud", "volume"),
    ("how warm", "temperature"),
    ("how cold", "temperature"),
    ("how hot", "temperature"),
    ("how is the weather", "weather"),
    ("what time", "current time"),
    ("am i free", "free busy availability"),
    ("is free", "availability"),
    ("i have to do", "list tasks"),
    ("have to do", "list tasks"),
    ("hand over", "assign"),
    ("hand out", "assign"),
    ("give access", "share permission"),
    ("let in", "invite"),
    ("put back", "restore"),
    ("bring back", "restore"),
    ("put off", "postpone"),
    ("call off", "cancel"),
    ("at the end", "append"),
    ("to the end", "append"),
    ("at the start", "prepend"),
    ("at the beginning", "prepend"),
    ("in front", "prepend"),
    ("look at", "view"),
    ("look through", "search"),
    ("look into", "investigate"),
    ("go through", "list"),
    ("hold on", "pause"),
    ("carry on", "resume"),
    ("go on", "resume"),
    ("switch off", "disable"),
    ("switch on", "enable"),
    ("try out", "test"),
    ("work out", "calculate"),
    ("keep an eye on", "monitor"),
    ("pull down", "download"),
    ("bring up", "open"),
    ("came in", "receive"),
    ("went wrong", "error"),
    ("goes wrong", "error"),
    ("going wrong", "error"),
    ("break down", "split"),
    ("is like", "similar"),
    ("are like", "similar"),
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
    "navigate visit browse goto open go",
    "leave add post put place",
    "add put append attach insert",
    "append extend end bottom",
    "hide archive shelve close",
    "rotate turn spin",
    "play listen hear",
    "pause hold suspend stop",
    "resume continue",
    "skip next forward",
    "postpone delay reschedule defer snooze",
    "split divide separate",
    "join combine merge unite concatenate",
    "sort order rank arrange",
    "link connect relate associate attach",
    "unlink disconnect detach",
    "allow grant permit permission access role",
    "forbid deny block ban revoke restrict",
    "borrow rent lease",
    "guess predict forecast estimate",
    "paint color colour fill",
    "wait delay sleep",
    "hover point mouse",
    "scroll swipe drag",
    "sum total add aggregate",
    "refund repay reimburse",
    "sync synchronize refresh pull",
    "trigger fire launch",
    "sign signature approve",
    "star favorite favourite bookmark like",
    "subscribe follow watch",
    "vote poll survey",
    "rate rating review score stars",
    "transcribe transcript subtitle caption",
    "similar related like nearest",
    "import load ingest",
    "empty clear truncate purge flush",
    "investigate analyze debug diagnose",
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
    "history log past",
    "request network http call traffic",
    "mailbox inbox mail",
    "draft unsent",
    "meeting appointment event calendar",
    "song track music tune",
    "playlist album",
    "film movie video",
    "book reference citation bibliography library",
    "lamp light bulb",
    "temperature heating thermostat climate",
    "door lock",
    "money balance payment amount",
    "discount coupon promotion",
    "bill invoice",
    "customer buyer shopper",
    "product item article goods",
    "sprint iteration cycle milestone",
    "epic project initiative",
    "board kanban",
    "status state progress stage",
    "deadline due date",
    "priority urgent important",
    "build pipeline job workflow action ci",
    "server machine host instance node vm app",
    "domain dns hostname",
    "backup snapshot dump",
    "traffic congestion",
    "area region zone boundary polygon",
    "shape object mesh geometry",
    "surface material texture",
    "camera view viewport",
    "layer frame component node",
    "design layout template theme",
    "effect animation transition",
    "footnote endnote",
    "quote cite citation",
    "question ask query faq",
    "permission access right role",
    "team department organization",
    "branch fork",
    "review feedback",
    "statistic stats metric measure figure number",
    "kind type category sort",
    "height altitude elevation",
    "similar neighbour neighbor nearest",
    "example sample demo",
    "dictionary glossary definition",
    "card flashcard note",
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
    "sql query statement",
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
# A query with one of the first words may mean one of the second, but not the other way round.
ALSO: Final = (
    ("change changed", "commit"),
    ("scientific science scholarly", "paper"),
    ("everywhere", "all"),
    ("propose", "pull"),
    ("rain snow sun sunny storm wind windy cloud umbrella cold warm hot", "weather forecast temperature"),
    ("polluted pollution smog", "air quality"),
    ("tomorrow yesterday today tonight week weekend month monday friday sunday", "date time day"),
    ("tomorrow week weekend soon next", "forecast upcoming"),
    ("restaurant cafe hotel shop store pharmacy museum station airport nearby", "place poi location"),
    ("street city town village country house building", "address place location"),
    ("mountain hill peak", "elevation"),
    ("walk drive cycle bike car bus train", "direction route distance"),
    ("near close around nearby", "distance radius location"),
    ("paragraph sentence chapter section passage", "block content text section heading"),
    ("bold italic yellow red green blue underline", "format style color"),
    ("dropdown menu checkbox", "select option"),
    ("checks check tests passed pass green", "status"),
    ("encyclopedia", "wikipedia article"),
    ("works work employee colleague coworker staff", "user member"),
    ("friend mate", "contact user"),
    ("boss chief", "manager owner"),
    ("hello hi greet", "message send"),
    ("milk groceries shopping", "task"),
    ("remind reminder", "task event"),
    ("emoji thumbs smiley", "reaction"),
    ("attendee guest participant", "member user invite"),
    ("busy free available availability", "calendar freebusy"),
    ("above below beside", "near"),
    ("failed fail broken breaks crash crashed wrong", "error issue failure"),
    ("slow slowly lag", "performance explain"),
    ("expensive cheap", "price cost"),
    ("money spent", "payment transaction"),
    ("pdf word docx", "convert export document"),
    ("said say says talked", "message comment conversation"),
    ("wrote write written", "message history"),
    ("saw seen happen happened", "history event log"),
    ("rows cells cell", "range sheet"),
    ("keys", "database"),
    ("picture image", "render"),
    ("loud quiet louder quieter", "volume"),
    ("bright dim brighter darker", "brightness light"),
    ("owe owes", "balance invoice"),
    ("subtitles captions spoken", "transcript"),
    ("similar alike", "related"),
    ("newest latest", "recent list"),
    ("everyone everybody anyone", "users members list all"),
    ("everything", "all list"),
    ("mine", "my current user"),
    ("myself", "whoami current user"),
    ("quickly fast faster", "performance index"),
    ("ball cube box sphere cylinder", "object shape"),
    ("circle rectangle square triangle arrow", "shape"),
)
# Base forms, each followed by its irregular forms.
IRREGULAR: Final = (
    "send sent",
    "write wrote written",
    "say said",
    "make made",
    "buy bought",
    "pay paid",
    "draw drew drawn",
    "run ran",
    "build built",
    "find found",
    "leave left",
    "take took taken",
    "give gave given",
    "see saw seen",
    "know knew known",
    "get got",
    "break broke broken",
    "choose chose chosen",
    "speak spoke spoken",
    "tell told",
    "read reading",
    "think thought",
    "bring brought",
    "catch caught",
    "sell sold",
    "spend spent",
    "keep kept",
    "person people",
    "child children",
    "mouse mice",
    "index indices",
    "analyze analysis analyses",
    "go went gone",
    "begin began begun",
    "hear heard",
    "hold held",
    "lose lost",
    "meet met",
    "show shown",
    "forget forgot forgotten",
    "datum data",
    "medium media",
    "life lives",
    "half halves",
)
# What verbs do to their object. The first verb of a tool's name, and of a query, decides.
ACTIONS: Final = {
    "look": "get list search find read fetch retrieve query show describe view count check lookup browse see look see "
    "download export inspect explain analyze compare what which who when where why how is are was were did does do "
    "has have any all latest scan summarize validate monitor watch track calculate geocode history current",
    "make": "create add insert new post send publish write append upload generate register invite make start compose "
    "draft schedule book leave tell say reply answer attach draw build install remind import",
    "change": "update edit modify set rename move patch replace format resize merge change convert adjust swap "
    "restart rotate scale assign mark close complete reorder resolve lock protect",
    "remove": "delete remove drop clear cancel unset archive erase forget discard destroy uninstall unlink kick trash",
}


@cache
def synonyms() -> dict[str, frozenset[str]]:
    """Return for each stem the stems that it may stand for."""
    found: dict[str, set[str]] = {}
    for group in GROUPS:
        stems = {stem(word) for word in group.split()}
        for one in stems:
            found.setdefault(one, set()).update(stems - {one})
    for said, meant in ALSO:
        for one in said.split():
            found.setdefault(stem(one), set()).update(stem(word) for word in meant.split())
    return {one: frozenset(others) for one, others in found.items()}


def rephrased(query: str) -> str:
    """Return a lower-case query with the phrases of `PHRASES` replaced by their words."""
    text = f" {query} "
    for said, meant in PHRASES:
        text = text.replace(f" {said} ", f" {meant} ")
    return text


@cache
def base_form(word: str) -> str:
    """Return the base form of an irregular form; any other word unchanged."""
    return _bases().get(word, word)


@cache
def _bases() -> dict[str, str]:
    return {form: base for base, *forms in (line.split() for line in IRREGULAR) for form in forms}


def action(words: Iterable[str]) -> str:
    """Return what the first verb among the words does (look, make, change, remove); empty if there is no verb."""
    return next((_actions()[word] for word in words if word in _actions()), "")


@cache
def _actions() -> dict[str, str]:
    return {verb: does for does, verbs in ACTIONS.items() for verb in verbs.split()}


# The stemmer: a few rules for endings, enough that `commits`, `committed` and `committing` find `commit`. A complete
# stemmer was tried first, but the snowball package takes half a second to import, because it has every language.

_VOWELS: Final = frozenset("aeiouy")
_KEPT_DOUBLE: Final = frozenset("lsz")
# Each ending with the number of letters that must be left without it.
_ENDINGS: Final = (("ication", 3), ("ization", 3), ("ation", 5), ("ion", 4), ("ing", 3), ("ed", 3), ("ly", 4))


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """Return the stem of a lower-case word."""
    if len(word) <= 3 or not word.isascii():
        return word
    word = _singular(word)
    for ending, least in _ENDINGS:
        rest = word.removesuffix(ending)
        if rest != word and len(rest) >= least and not _VOWELS.isdisjoint(rest):
            word = _single(rest)
            break
    # Drop the last letter in which `query` and `queries`, `stage` and `staging` may still differ.
    return word[:-1] if len(word) > 3 and word[-1] in "eyi" else word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if word.endswith(("sses", "shes", "ches", "xes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def _single(word: str) -> str:
    """Return a word without its doubled last letter: `committ` becomes `commit`, `call` stays."""
    is_double = len(word) > 3 and word[-1] == word[-2] and word[-1] not in _VOWELS | _KEPT_DOUBLE
    return word[:-1] if is_double else word
