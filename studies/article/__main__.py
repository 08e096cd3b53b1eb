from studies.article.study import main

main()
