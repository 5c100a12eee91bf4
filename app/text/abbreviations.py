"""Words whose full stop need not end a sentence, by language.

Four classes, because they fail in different ways:

* ``before_name``: a title or a connective; what follows belongs to it ("Dr. Mills", "e.g. Python").
  Its stop never ends a sentence.
* ``before_number``: its stop is part of it only when a number follows ("No. 7", "Fig. 3", "jan. 5").
* ``before_capital``: often followed by a capital inside a sentence ("Co. Ltd.", "St. Mary"); ends one only
  before a word that commonly opens sentences (``openers``).
* ``anywhere``: seldom followed by a capital inside a sentence ("etc."); the case of the next letter decides.

In doubt the tables keep two sentences together: a model translates two sentences as one segment about as
well as apart, but half a sentence badly.

All entries are lower-case and without the final stop. Single letters and dotted acronyms
("J.", "U.S.") need no entry: ``segmentation`` knows them by shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Abbreviations:
    """The four classes for one language, and the words that commonly open a sentence.

    Attributes:
        before_name: the stop never ends a sentence.
        before_number: the stop does not end a sentence if a number (or Roman numeral) follows.
        before_capital: the stop ends a sentence only before one of ``openers``.
        anywhere: the stop ends a sentence if an upper-case letter follows.
        openers: capitalised words that open a sentence even after an initial or an acronym.
    """

    before_name: frozenset[str]
    before_number: frozenset[str]
    before_capital: frozenset[str]
    anywhere: frozenset[str]
    openers: frozenset[str]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON = Abbreviations(
    before_name=_words("dr prof vs cf ing"),
    before_number=_words("no nr vol fig art p pp tel"),
    before_capital=_words("st co corp inc ltd"),
    anywhere=_words("etc al jr"),
    openers=frozenset(),
)

_ENGLISH = Abbreviations(
    before_name=_words(
        "mr mrs ms mx messrs drs profs gen sen rep gov capt cpt lt col sgt maj cmdr adm rev hon pres"
        " supt mt e.g i.e eg ie viz resp approx fr sra srta"
    ),
    before_number=_words(
        "nos figs ch chap sec sect eq eqs vols para ref refs ver v art arts ca circa est jan feb mar"
        " apr jun jul aug sep sept oct nov dec ext min max pop"
    ),
    before_capital=_words("llc plc bros dept univ assn ave blvd rd hwy ft ed eds sr"),
    anywhere=_words("esq am pm mon tue tues wed thu thur thurs fri sat sun trans"),
    openers=_words(
        "A After All Although An And Another As At Because Before Both But By Each Even Every"
        " Everyone Finally First For From He Her Here His How However I If In Instead It Its Just"
        " Later Many Maybe Most My Never Next No Nobody None Nothing Now Of On Once One Only Or Our"
        " Perhaps Please She Since So Some Somebody Someone Sometimes Still Such That The Their Then"
        " There These They This Those Though Thus To Today Under Until We What When Where Which While"
        " Who Why With Yes Yet You Your"
    ),
)

_PORTUGUESE = Abbreviations(
    before_name=_words(
        "dra drs dras sr sra srs sras srta srtas snr prof profa profas profs eng enga arq gen cel cap"
        " ten maj sgt alm brig adv des dep sen gov pres min exmo exma exmos exmas ilmo ilma pe fr sto"
        " sta exa exas rev av pça pca trav rod lg p.ex ex i.e e.g aprox v.g mons côn"
    ),
    before_number=_words(
        "n nº nos num núm art arts pág pag págs pags fl fls vol vols cap caps fig figs ed eds inc par"
        " séc sec séculos tel cel ramal lj ap apto apt bl sl cx km jan fev mar abr mai jun jul ago set"
        " out nov dez máx mín"
    ),
    before_capital=_words("ltda cia s.a"),
    anywhere=_words("a.c d.c vv obs trad org orgs coord coords hab"),
    openers=_words(
        "A Agora Além Algumas Alguns Ainda Antes Ao Aos Apesar Após As Assim Até Cada Com Como Da Das"
        " De Depois Do Dos E Ela Elas Ele Eles Em Enquanto Então Era Essa Essas Esse Esses Esta Estas"
        " Este Estes Eu Foi Há Hoje Isso Isto Já Mais Mas Muitas Muitos Na Nada Nas Nenhum Nenhuma"
        " Ninguém No Nos Nós Nunca O Onde Os Ou Outra Outras Outro Outros Para Pela Pelo Pois Por"
        " Porém Porque Quando Que Quem Se Sem Sempre Seu Sua Também Tem Toda Todas Todo Todos Tudo Um"
        " Uma Você Vocês"
    ),
)

_SPANISH = Abbreviations(
    before_name=_words(
        "dra sr sra sres sras srta d dña da prof profa ing arq lic gral av avda p.ej ej ud uds sto sta"
    ),
    before_number=_words("n núm nº pág págs art cap fig vol tel"),
    before_capital=_words("s.a ee.uu cía ltda"),
    anywhere=_words("aprox"),
    openers=_words(
        "A Al Así Aunque Cada Como Con Cuando De Después El Ella Ellos En Era Es Esta Este Esto Fue"
        " Hay La Las Lo Los Más Mi Nadie No Nos Para Pero Por Porque Que Se Si Sin Su También Un Una Y"
        " Yo"
    ),
)

_FRENCH = Abbreviations(
    before_name=_words("m mm mme mmes mlle mlles me mgr pr ste p.ex ex cf"),
    before_number=_words("n nº p pp art chap fig vol tél av apr"),
    before_capital=_words("s.a éd"),
    anywhere=_words("env"),
    openers=_words(
        "À Après Au Aussi Avec Ce Ces Cette Dans De Depuis Des Elle Elles En Et Il Ils Je La Le Les"
        " Leur Lorsque Mais Nous On Où Par Pour Puis Quand Si Son Sur Tous Tout Un Une Vous"
    ),
)

_GERMAN = Abbreviations(
    before_name=_words("hr fr frl dipl z.b d.h u.a bzw ggf evtl sog inkl zzgl ca vgl s bspw str"),
    before_number=_words("nr abb kap bd s art abs jan feb apr aug sept okt nov dez tel"),
    before_capital=_words("gmbh"),
    anywhere=_words("usw u.s.w"),
    openers=_words(
        "Aber Als Am Auch Auf Bei Da Dann Das Dem Den Der Des Die Diese Dieser Dieses Doch Ein Eine"
        " Er Es Für Ich Ihr Im In Ist Man Mit Nach Niemand Nur Sie So Und Von Wenn Wie Wir Zu"
    ),
)

_ITALIAN = Abbreviations(
    before_name=_words("sig sigg dott avv ing arch on es p.es cfr s ss geom rag"),
    before_number=_words("n pag pagg art cap fig vol tel"),
    before_capital=_words("s.p.a s.r.l"),
    anywhere=_words("ecc"),
    openers=_words(
        "A Al Anche Che Come Con Da Di Dopo E Gli Ha I Il In La Le Lo Ma Nel Nessuno Non Per Poi"
        " Quando Questa Questo Se Si Sono Un Una"
    ),
)

_BY_LANGUAGE = {
    "en": _ENGLISH,
    "pt": _PORTUGUESE,
    "es": _SPANISH,
    "fr": _FRENCH,
    "de": _GERMAN,
    "it": _ITALIAN,
}


def _merge(first: Abbreviations, second: Abbreviations) -> Abbreviations:
    return Abbreviations(
        before_name=first.before_name | second.before_name,
        before_number=first.before_number | second.before_number,
        before_capital=first.before_capital | second.before_capital,
        anywhere=first.anywhere | second.anywhere,
        openers=first.openers | second.openers,
    )


_MERGED = {language: _merge(_COMMON, own) for language, own in _BY_LANGUAGE.items()}


def abbreviations_for(language: str) -> Abbreviations:
    """Return the tables for a primary language subtag (``"pt"``), or the common ones if it has none."""
    return _MERGED.get(language, _COMMON)
