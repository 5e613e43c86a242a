BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE answers (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	document JSON NOT NULL,
	hits INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	used_at DATETIME NOT NULL,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE TABLE jobs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	name VARCHAR(255) NOT NULL,
	state VARCHAR(16) NOT NULL,
	stop_reason VARCHAR(16),
	priority INTEGER NOT NULL,
	run_dir TEXT NOT NULL,
	owner VARCHAR(128),
	created_at FLOAT NOT NULL,
	started_at FLOAT,
	ended_at FLOAT,
	attempts INTEGER NOT NULL,
	crashes INTEGER NOT NULL,
	last_checkpoint_step INTEGER,
	exit_code INTEGER,
	error JSON,
	result JSON
, history JSON DEFAULT '[]' NOT NULL, submission_key VARCHAR(64), notes JSON DEFAULT '[]' NOT NULL, output_dir TEXT, position INTEGER DEFAULT '0' NOT NULL, label VARCHAR(64), hold VARCHAR(16), after_id INTEGER, begin_at FLOAT, window VARCHAR(128));
INSERT INTO "jobs" VALUES(1,'done','done',NULL,0,'{state}/runs/1',NULL,1.79533881523500776292e+09,1.79533883731966018675e+09,1.79533888291418075554e+09,1,0,2,0,NULL,'{"event": "end", "time": 1795338878.0202494, "step": 3, "status": "done", "output": "{state}/runs/1/output", "step_s": 0.01981451299980108, "measured_steps": 1, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.012529481806676866, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795338837.3196602, "from_step": null, "ended_at": 1795338882.9141808, "metrics_from": 0, "ending": "the trainer is done", "reached_step": 3, "checkpoint_step": 2}]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,1,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(2,'does-not-fit','failed',NULL,0,'{state}/runs/2',NULL,1.79533888310366749763e+09,NULL,1.79533891084380292898e+09,0,0,NULL,3,'{"what": "No schedule fits this memory budget.", "numbers": ["budget 100.0 KiB, least possible 907.7 KiB"], "hint": "give --gpu-budget 908KiB or, in the job file, gpu_budget: 908KiB", "code": "budget-too-small", "exit_code": 3}',NULL,'[]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,2,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(3,'no-data','failed',NULL,0,'{state}/runs/3',NULL,1.79533891097983050347e+09,NULL,1.79533891436440110208e+09,0,0,NULL,2,'{"what": "resolved.yaml has one mistake.", "numbers": ["line 3: dataset: there is no dataset at {home}/gone.jsonl"], "hint": "correct the file and try again; docs/jobs.md lists every key", "code": "missing-file", "exit_code": 2}',NULL,'[]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,3,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(4,'cancelled-running','cancelled','cancel',0,'{state}/runs/4',NULL,1.79533891449562430378e+09,1.79533893630167865756e+09,1.79533896075764298435e+09,1,0,8,-15,NULL,'{"event": "end", "time": 1795338960.1555693, "step": 8, "status": "stopped", "output": null, "step_s": 0.020281696000893135, "measured_steps": 6, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.012529481806676866, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795338936.3016787, "from_step": null, "ended_at": 1795338960.757643, "metrics_from": 0, "ending": "cancelled", "reached_step": 8, "checkpoint_step": 8}]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,4,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(5,'cancelled-waiting','cancelled','cancel',0,'{state}/runs/5',NULL,1.79533895990391373633e+09,NULL,1.79533895997027921672e+09,0,0,NULL,NULL,NULL,NULL,'[]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,5,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(6,'running','waiting','shutdown',0,'{state}/runs/6',NULL,1.79533896090870094303e+09,1.79533898136436986924e+09,NULL,2,0,4,75,NULL,NULL,'[{"number": 1, "started_at": 1795338981.3643699, "from_step": null, "ended_at": 1795339040.163725, "metrics_from": 0, "ending": "went down with the daemon or the machine", "reached_step": 3, "checkpoint_step": 2}, {"number": 2, "started_at": 1795339044.747516, "from_step": 2, "ended_at": 1795339078.5705907, "metrics_from": 1068, "ending": "stopped with the daemon", "reached_step": 4, "checkpoint_step": 4}]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,6,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(7,'waiting','waiting',NULL,0,'{state}/runs/7',NULL,1.79533900796359562872e+09,NULL,NULL,0,0,NULL,0,NULL,NULL,'[]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,7,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(8,'planning','submitted','shutdown',0,'{state}/runs/8',NULL,1.79533903218390893932e+09,NULL,NULL,0,0,NULL,-15,NULL,NULL,'[]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,8,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(9,'submitted','submitted',NULL,0,'{state}/runs/9',NULL,1.79533903255278778077e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL,'[]',NULL,'["{home}/model has no weights: the model starts from random ones under seed 42."]',NULL,9,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE measurements (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	device VARCHAR(255) NOT NULL,
	document JSON NOT NULL,
	hits INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	used_at DATETIME NOT NULL,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE TABLE plans (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	model VARCHAR(1024) NOT NULL,
	document JSON NOT NULL,
	solve_s FLOAT NOT NULL,
	hits INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	used_at DATETIME NOT NULL,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE TABLE wishes (
	name VARCHAR(32) NOT NULL, 
	since FLOAT, 
	PRIMARY KEY (name)
);
CREATE UNIQUE INDEX ix_jobs_submission_key ON jobs (submission_key);
CREATE INDEX ix_jobs_output_dir ON jobs (output_dir);
CREATE INDEX ix_jobs_queue ON jobs (state, priority, position, hold, begin_at, after_id);
CREATE INDEX ix_jobs_position ON jobs (position);
CREATE INDEX ix_jobs_label ON jobs (label);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',9);
COMMIT;
