"""Question 2: the network, the address and the port for a table of hosts."""

import ipaddress
import operator
from contextlib import suppress
from functools import partial

from ddp_course.checks.claims import Claim, OneOf, hold
from ddp_course.checks.ex14 import laboratory
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

# what may be wrong with a network that looks faster than the right one
TRAPS = {
    "bridges": "a bridge inside each host has the same address on all of them",
    "down": "the fastest network's interface is down on one host",
    "partial": "the fastest network does not reach all hosts",
    "uneven": "one host's interface is much slower than the others'",
    "lookalike": "addresses that look alike are in different networks",
    "alike": "two hosts have the same address in the fastest network, the others have their own",
    "prefixes": "one host has another prefix length in the fastest network",
    "spare": "one host has a second interface in the right network, which is down",
}
BRIDGES = [("docker0", "172.17.0.1/16"), ("virbr0", "192.168.122.1/24")]


# ---- tables ----


def a_table(draw, traps, good_ports="first", wide=False, names_lead="elsewhere"):
    """A table of hosts, and the ports to choose from.

    traps: of TRAPS. good_ports: where there is a good port, on the "first" host, on the
    "last" one, or "none". wide: the right network is a /16. names_lead: where the names
    of /etc/hosts lead: "elsewhere", to a slower network; "right"; right, but "elsewhere
    there", on one host, or "unknown there"; or elsewhere, but "right of itself".
    """
    n = draw.randrange(3, 5)
    start = draw.randrange(20_000, 60_000)
    ports = draw.sample(range(start, start + 500), 5)
    nets = [draw.randrange(1, 120), draw.randrange(130, 250)]
    first, length = draw.choice([10, 131]), 16 if wide else draw.choice([22, 24, 26, 28])
    right = [f"{first}.{nets[0]}.{k if wide else 0}.{11 - 5 * k % 11}/{length}" for k in range(n)]
    slow = [f"192.168.{nets[1]}.{51 + k}/24" for k in range(n)]
    fast = [f"10.{nets[1]}.0.{11 + k}/24" for k in range(n)]
    found = {"slow": (slow, [1000] * n), "right": (right, [25_000] * n)}
    if "bridges" in traps:
        bridge, inside = draw.choice(BRIDGES)
        found[bridge] = ([inside] * n, [40_000] * n)
    if "down" in traps or "partial" in traps:
        found["fast"] = (fast, [100_000] * n)
    if "uneven" in traps:
        found["fast"] = (fast, [100_000] * (n - 1) + [10_000])
    if "lookalike" in traps:
        found["fast"] = ([f"10.{nets[1]}.0.{3 + 64 * k}/26" for k in range(n)], [50_000] * n)
    odd = draw.randrange(n)  # the host with the trap
    if "alike" in traps:
        found["fast"] = ([fast[0], *fast[1:-1], fast[0]], [100_000] * n)
    if "prefixes" in traps:
        found["fast"] = ([each.replace("/24", "/16") if k == odd else each for k, each in enumerate(fast)], [100_000] * n)
    hosts_names = draw.sample([f"node{k}" for k in range(n)], n)
    names = {"slow": ["eth0", "eno1"], "right": ["eth1", "ens5f0"], "fast": ["ib0", "eth2"]}
    hosts = []
    for k in range(n):
        interfaces = [
            {
                "name": draw.choice(names.get(name, [name])),
                "address": addresses[k],
                "up": not (name == "fast" and "down" in traps and k == odd),
                "speed": speeds[k],
            }
            for name, (addresses, speeds) in found.items()
            if not (name == "fast" and "partial" in traps and k == odd)
        ]
        draw.shuffle(interfaces)
        lo = {"name": "lo", "address": "127.0.0.1/8", "up": True, "speed": 0}
        if "spare" in traps and k == odd:
            spare = right[k].replace(f".{11 - 5 * k % 11}/", f".{9 - k}/") if length < 28 else right[k]
            interfaces.append({"name": "eth7", "address": spare, "up": False, "speed": 100_000})
        is_right = names_lead == "right" or names_lead.endswith("there") and k != odd
        resolves = {hosts_names[j]: (right if is_right else slow)[j].split("/")[0] for j in range(n)}
        if names_lead == "unknown there" and k == odd:
            resolves = {}
        resolves[hosts_names[k]] = right[k].split("/")[0] if names_lead == "right of itself" else "127.0.1.1"
        good = {"first": True, "last": k == n - 1, "none": False}[good_ports]
        taken, blocked = [ports[0], 22], [ports[1], ports[3]]
        if not good:
            taken, blocked = [22, ports[4]], ports[:4]
        host = {"name": hosts_names[k], "interfaces": [lo, *interfaces]}
        hosts.append(host | {"resolves": resolves, "taken": taken, "blocked": blocked})
    return hosts, ports


def without_a_network(draw):
    """A table in which no network joins all hosts."""
    hosts, ports = a_table(draw, ["bridges", "partial"])
    for name in networks(hosts):
        for interface in hosts[-1]["interfaces"]:
            if network_of(interface) == name:
                interface["up"] = False
    return hosts, ports


def of_unknown_speed(draw):
    """A table with one network that joins all hosts, and no speed of one interface in it."""
    hosts, ports = a_table(draw, [])
    network = fastest(hosts)
    for host in hosts:
        for interface in host["interfaces"]:
            interface["up"] = network_of(interface) == network
    own(hosts[-1], network)["speed"] = 0
    return hosts, ports


def cases_of(draw):
    plain = [a_table(draw, [], names_lead="right"), a_table(draw, [], wide=True), of_unknown_speed(draw)]
    plain += [a_table(draw, [], names_lead=lead) for lead in ("elsewhere there", "unknown there", "right of itself")]
    trapped = [a_table(draw, [trap]) for trap in TRAPS]
    together = [a_table(draw, ["bridges", *draw.sample([*TRAPS][1:], 1)], wide=draw.random() < 0.5) for _ in range(4)]
    at_the_end = [a_table(draw, ["bridges", "uneven"], "last"), a_table(draw, [], "last")]
    hopeless = [a_table(draw, ["bridges"], "none"), without_a_network(draw)]
    return [*plain, *trapped, *together, *at_the_end, *hopeless]


# ---- what is true of a table ----


def network_of(interface):
    return ipaddress.ip_interface(interface["address"]).network


def networks(hosts):
    """The networks that join all hosts, {network: its speed in Mbit/s}."""
    found = {}
    for network in {network_of(i) for host in hosts for i in host["interfaces"]}:
        members = [[i for i in host["interfaces"] if i["up"] and network_of(i) == network] for host in hosts]
        if network.is_loopback or not all(members):
            continue
        addresses = [own[0]["address"] for own in members]
        if len(set(addresses)) == len(hosts):
            found[network] = min(own[0]["speed"] for own in members)
    return found


def usable(host, ports):
    """The ports of these that are free and open on a host."""
    closed = {*host["taken"], *host["blocked"]}
    return [port for port in ports if port not in closed]


def observe_places(meeting_place, cases):
    seen = []
    for number, (hosts, ports) in enumerate(cases):
        with trying(f"table {number}: {in_words(hosts)}"):
            seen.append(as_plain(meeting_place(hosts, list(ports))))
    return seen


def as_plain(returned):
    """[address, port, interfaces], a port of any kind of whole number as an int."""
    if returned is None or isinstance(returned, str | dict):
        return returned
    with suppress(TypeError, ValueError):
        address, port, names = returned
        with suppress(TypeError):
            port = operator.index(port)
        address = str(address) if is_address(str(address)) else address
        return [address, port, names if isinstance(names, dict | str) else list(names)]
    return returned


def is_address(text):
    with suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def in_words(hosts):
    """The interfaces of a table, a line per host."""
    return "\n" + "\n".join(
        f"{host['name']}: "
        + ", ".join(
            f"{i['name']} {i['address']}{'' if i['up'] else ' (down)'} {i['speed']}" for i in host["interfaces"]
        )
        for host in hosts
    )


# ---- what is claimed ----


def fastest(hosts):
    """The fastest network that joins all hosts, or None."""
    found = networks(hosts)
    return max(found, key=found.get, default=None)


def claims(hosts, ports, got):
    """All hosts can meet there, and have no faster network."""
    checked, network, (first, *_, last) = f"meeting_place(hosts, ports) for{in_words(hosts)}", fastest(hosts), hosts
    hopeless = "no network joins all hosts: return None"
    if network:
        hopeless = "on all hosts, each of these ports is taken or blocked: return None"
    if not network or not any(usable(host, ports) for host in hosts):
        yield Claim(checked, got, None, hopeless, told="None")
        return
    there_is = f"there is a way, over {network}"
    if not usable(first, ports):
        there_is = f"{first['name']} has no good port, but {last['name']} has: the rendezvous may be on any host"
    told = "an address, a port, and names of interfaces"
    yield Claim(checked, got is None, False, there_is, told=told, shown="None")
    yield Claim(
        checked, isinstance(got, list) and len(got) == 3 and isinstance(got[2], list), True,
        "return three things: MASTER_ADDR, MASTER_PORT, and a list with the name of an interface for each host",
        told=told, shown=got,
    )  # fmt: skip
    address, port, names = got
    right = [own(host, network)["name"] for host in hosts]
    yield Claim(
        checked, names, right, partial(cause_of_interfaces, hosts, names, network), told=f"{right}, in {network}"
    )
    place = host_of(address, hosts, network)
    yield Claim(
        checked, place is not None, True, partial(cause_of_address, address, hosts, network),
        told=f"one of {addresses_in(network, hosts)}, or a name for it", shown=address,
    )  # fmt: skip
    host, good = hosts[place], usable(hosts[place], ports)
    yield Claim(
        checked, port, OneOf(good),
        "this port is not one of those to choose from" if type(port) is int else "the port is a whole number",
        mistakes_in_ports(host, ports, good),
        told=f"one of {good} on {host['name']}" if good else f"another host than {host['name']}",
        shown=f"port {port!r} on {host['name']}",
    )  # fmt: skip


def cause_of_interfaces(hosts, names, network):
    """Why the interfaces with these names are not those of the fastest network."""
    if len(names) != len(hosts):
        return f"there are {len(hosts)} hosts, and each needs the name of its interface, in the hosts' order"
    chosen = []
    for host, name in zip(hosts, names):
        matching = [i for i in host["interfaces"] if i["name"] == name]
        if not matching:
            return f"{host['name']} has no interface {name!r}: interfaces may have other names on other hosts"
        chosen.append(matching[0])
    for host, interface in zip(hosts, chosen):
        if network_of(interface).is_loopback:
            return "lo leads to the host itself: the other hosts cannot be reached over it"
        if not interface["up"]:
            return f"{interface['name']} is down on {host['name']}"
    addresses = [interface["address"] for interface in chosen]
    if len(set(addresses)) < len(addresses):
        return (
            f"several hosts have the address {addresses[0]}: this is a bridge inside each host, not a network between "
            "them"
        )
    used = list(dict.fromkeys(map(network_of, chosen)))
    if len(used) > 1:
        cause = "an address and its prefix say which network it is in, and these are in different ones"
        return f"{cause}: {', '.join(map(str, used[:3]))}"
    slow, speed = min(interface["speed"] for interface in chosen), networks(hosts)[network]
    cause = f"in {used[0]} the slowest interface has {slow} Mbit/s, and a ring is as slow as its slowest link"
    return f"{cause}; {network} has {speed} everywhere"


def own(host, network):
    """A host's interface in a network."""
    return next(i for i in host["interfaces"] if i["up"] and network_of(i) == network)


def addresses_in(network, hosts):
    return [bare(own(host, network)) for host in hosts]


def bare(interface):
    return interface["address"].split("/")[0]


def host_of(text, hosts, network):
    """The number of the host that all others reach by this text; None if there is none."""
    for place, (host, address) in enumerate(zip(hosts, addresses_in(network, hosts))):
        if text == address or text == host["name"] and not misled(text, address, hosts):
            return place
    return None


def misled(name, address, hosts):
    """The hosts on which a host's name leads elsewhere; it itself does not need its name."""
    return [host for host in hosts if host["name"] != name and host["resolves"].get(name) != address]


def cause_of_address(text, hosts, network):
    """Why not all hosts reach one host by this text."""
    addresses = dict(zip((host["name"] for host in hosts), addresses_in(network, hosts)))
    if text in addresses:
        host = misled(text, addresses[text], hosts)[0]
        meant = host["resolves"].get(text)
        cause = f"the /etc/hosts of {host['name']} says {meant} for {text}, which is not its address in {network}"
        if meant is None:
            cause = f"{host['name']} does not know the name {text}"
        return f"{cause}: give the address"
    if not isinstance(text, str) or not is_address(text):
        return "MASTER_ADDR is an address, without its prefix, or a name that all hosts know"
    if ipaddress.ip_address(text).is_loopback:
        return "an address that begins with 127 means 'this host' on every host, also if /etc/hosts gives it for a name"
    if text in [bare(interface) for host in hosts for interface in host["interfaces"]]:
        return f"this address is not in {network}: the rendezvous has to be in the network that you chose"
    return "no host has this address"


def mistakes_in_ports(host, ports, good):
    others = "" if good else ". This host has no good port: look at the others"
    causes = {
        "taken": "somebody listens at this port already: the job would end with EADDRINUSE, or talk to another job",
        "blocked": "the firewall of this host drops what comes to this port: the other hosts would wait for their time "
        "limit",
    }
    return [(OneOf([port for port in ports if port in host[kind]]), cause + others) for kind, cause in causes.items()]


# ---- the question ----


@question(
    "Begin with the networks. ipaddress.ip_interface('10.0.3.7/16').network is the network of an interface. Which networks "
    "have an interface that is up on every host? lo is on every host, too, but leads to the host itself.",
    "For each network, collect each host's interface: name, address, speed. Leave out networks that miss a host, loopback, "
    "and those in which two hosts have the same address: these are bridges inside each host. A network is as fast as the "
    "slowest of its interfaces. Then look for a host with a port that is neither taken nor blocked on it.",
    "networks = {}; for host in hosts: for i in host['interfaces']: if i['up']: "
    "networks.setdefault(ip_interface(i['address']).network, {})[host['name']] = i. Keep those with len(found) == "
    "len(hosts) == len({i['address'] for i in found.values()}) that are not .is_loopback; take max(..., key=lambda found: "
    "min(i['speed'] for i in found.values())). MASTER_ADDR is the address of the first host with a good port, without the "
    "/24; a name is not needed.",
)
def check_meeting_place(answer, draw):
    """On drawn tables, network, address and port must be those that work; then real
    ranks meet there, on three machines, where this system allows them.
    """
    cases = cases_of(draw)
    [seen] = answer.on_ranks(observe_places, cases, timeout=10)
    for (hosts, ports), got in zip(cases, seen):
        hold(claims(hosts, ports, got))
    if obstacle := laboratory.obstacle():
        print(f"judged by tables alone, without machines: {obstacle}")
        return
    with laboratory.machines() as (machines, hosts, ports):
        [[got]] = answer.on_ranks(observe_places, [(hosts, ports)])
        hold(claims(hosts, ports, got))
        laboratory.meet(machines, *got, host_of(got[0], hosts, fastest(hosts)))
