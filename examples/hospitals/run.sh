#!/bin/sh
# Five hospitals, from their tables to a model in use. Everything is written beside this file.
set -e
cd "$(dirname "$0")"
python make_tables.py

# What is in the tables, by the schema of the experiment: what is missing, constant, unlike the others, leaking.
sartor data experiment.toml

# Simulated where all tables are, and beside other methods.
sartor run experiment.toml --out simulated
sartor compare experiment.toml --algorithms fedavg,ditto --seeds 2 --out compared

# The same on five nodes, each with its own table and key, over TLS. Here all of them are on this machine.
sartor keys keys --host 127.0.0.1 --nodes oslo,bergen,narvik,tromso,vardo
sartor serve experiment.toml --listen 127.0.0.1:18080 --out deployed --tls keys/server.crt keys/server.key keys/ca.crt --nodes keys/nodes.pub &
sartor join 127.0.0.1:18080 --data tables/oslo.csv --key keys/oslo.key --ca keys/ca.crt --state state/oslo &
sartor join 127.0.0.1:18080 --data tables/bergen.csv --key keys/bergen.key --ca keys/ca.crt --state state/bergen &
sartor join 127.0.0.1:18080 --data tables/narvik.csv --key keys/narvik.key --ca keys/ca.crt --state state/narvik &
sartor join 127.0.0.1:18080 --data tables/tromso.csv --key keys/tromso.key --ca keys/ca.crt --state state/tromso &
sartor join 127.0.0.1:18080 --data tables/vardo.csv --key keys/vardo.key --ca keys/ca.crt --state state/vardo &
wait
sartor audit state/oslo

# Oslo's own model, which never left it, in one file with all that is done to a row, and in use.
sartor export --state state/oslo --out oslo.pt2
sartor predict oslo.pt2 new.csv --out scored.csv
