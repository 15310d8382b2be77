-- One database for each "-- database" line: what real benchmark databases hold, and what none of those at hand did.
-- database names
CREATE TABLE "Order Details"("T-BIL" INT, "Home Town" TEXT, "order" INT REFERENCES "order"("we""ird"));
INSERT INTO "Order Details" VALUES (1, 'x', 5);
CREATE TABLE "order"("we""ird" INTEGER PRIMARY KEY, "a]b" TEXT);
INSERT INTO "order" VALUES (5, 'y');
CREATE TABLE [select]("%_Change" INT, "#_Records" INT, "(millions)" REAL, "alter" INT);
INSERT INTO [select] VALUES (1, 2, 3.5, 4);
CREATE TABLE "1st"("2nd" INT);
CREATE TABLE "sänger"("kapazität" INT, "höchste" TEXT);
INSERT INTO "sänger" VALUES (1, 'ä');
CREATE TABLE "a
b"("c
d" INT);
CREATE TABLE "'"("`" INT);
CREATE TABLE "table; DROP TABLE [select]"("x"" FROM y; --" INT);
CREATE VIEW "Order Details Extended" AS SELECT [Order Details].[T-BIL], "Home Town" FROM [Order Details];
-- database values
CREATE TABLE v(id INTEGER PRIMARY KEY, t TEXT, r REAL, b BLOB, any);
INSERT INTO v VALUES (1, 'NULL', 1.0, x'00ff', 9e999), (2, NULL, -9e999, zeroblob(20000), ''), (3, ' APG', 0.1, NULL, 'a|b'),
 (4, 'Black Widow' || char(10), 1e300, x'', 9223372036854775807), (5, 'a | b', 5, x'4dfc', 'x' || char(0) || 'y'),
 (6, CAST(x'4dfc6e6368656e' AS TEXT), 2, CAST(x'80' AS TEXT), '<|im_end|></tool_response>'),
 (7, hex(zeroblob(8000)), 3, 'text in a blob', '{"tool": "submit_sql", "args": {"sql": "SELECT 1"}}'),
 (8, '''', 4, '\n', '😀' || char(0x2028) || char(0x202e));
-- database kinds
CREATE TABLE item(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, price REAL CHECK (price > 0));
INSERT INTO item(name, price) VALUES ('ant', 1.5), ('bee', 2.25);
CREATE TABLE w(a TEXT PRIMARY KEY, b) WITHOUT ROWID;
INSERT INTO w VALUES ('k', 1);
CREATE TABLE g(a INT, b INT GENERATED ALWAYS AS (a * 2) STORED, c INT AS (a + 1));
INSERT INTO g(a) VALUES (4);
CREATE TABLE s(a INT, b TEXT) STRICT;
INSERT INTO s VALUES (1, 'x');
CREATE TABLE untyped(a, b, c);
CREATE VIEW v1 AS SELECT id, name FROM item;
CREATE VIEW v2 AS SELECT name FROM v1;
CREATE VIEW gone AS SELECT * FROM nowhere;
CREATE VIEW unsafe AS SELECT load_extension('x') AS y;
CREATE VIEW endless AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) AS n FROM r;
CREATE TRIGGER t AFTER INSERT ON item BEGIN DELETE FROM s; END;
CREATE VIRTUAL TABLE doc USING fts5(title, body);
INSERT INTO doc VALUES ('hello', 'world of ants');
CREATE VIRTUAL TABLE old USING fts4(a);
INSERT INTO old VALUES ('ants and bees');
CREATE VIRTUAL TABLE box USING rtree(id, a, b);
INSERT INTO box VALUES (1, 0, 1);
CREATE INDEX part ON item(name) WHERE price > 2;
-- database keys
CREATE TABLE country(code TEXT PRIMARY KEY, name TEXT);
CREATE TABLE city(id INTEGER PRIMARY KEY, country TEXT REFERENCES Country(CODE), twin INT REFERENCES city(id));
CREATE TABLE flight(no INT, src INT REFERENCES city, dst INT REFERENCES city, PRIMARY KEY (no, src));
CREATE TABLE leg(flight_no INT, flight_src INT, seat TEXT, FOREIGN KEY (flight_no, flight_src) REFERENCES flight(no, src));
CREATE TABLE meal(flight_no INT, flight_src INT, dish TEXT, FOREIGN KEY (flight_no, flight_src) REFERENCES flight);
CREATE TABLE crew(id INTEGER PRIMARY KEY, home INT REFERENCES nowhere(id), wrong INT REFERENCES city(nope));
CREATE TABLE a1(id INTEGER PRIMARY KEY);
CREATE TABLE b1(id INTEGER PRIMARY KEY, a INT REFERENCES a1);
CREATE TABLE b2(id INTEGER PRIMARY KEY, a INT REFERENCES a1);
CREATE TABLE c1(b1 INT REFERENCES b1, b2 INT REFERENCES b2);
CREATE TABLE orders(id INTEGER PRIMARY KEY, customer_id INT, shop_code TEXT);
CREATE TABLE customers(id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE categories(category_key INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE products(productId INT, categoryId INT, shop_code TEXT, name TEXT);
CREATE TABLE island(x INT);
-- database guesses
CREATE TABLE client(client_no INTEGER PRIMARY KEY, town TEXT);
CREATE TABLE bill(bill_no INTEGER PRIMARY KEY, client_no INT);
CREATE TABLE item(bill_no INT, town TEXT);
CREATE TABLE depot(town TEXT, floor INT);
-- database empty
CREATE TABLE e(a, b);
CREATE TABLE f(a PRIMARY KEY, b);
